"""What the strategies share: starting and ending ranks, rendezvous, gradients, checkpoints, stages of a module."""
