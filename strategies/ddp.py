"""Data parallelism: each rank holds the whole model, gradients are averaged."""

from strategies.exact import Exact


class DDP(Exact):
    """Lightning's distributed data parallel, started by fork on CPU; `--exact` can run on it."""
