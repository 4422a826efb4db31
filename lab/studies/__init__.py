"""Studies of messages, attention kernels, strategies and pipelines."""
