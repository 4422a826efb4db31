"""Data parallelism: each rank holds the whole model, gradients are averaged."""

from strategies.base import DataParallel


class DDP(DataParallel):
    """Lightning's distributed data parallel, started by fork on CPU; `--exact` can run on it."""
