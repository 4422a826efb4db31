"""Shared by all strategies: launchers, rendezvous, errors of ranks, gradients, checkpoints, stages of a module."""
