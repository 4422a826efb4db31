"""Data parallelism: each rank holds the whole model, gradients are averaged."""

from strategies.exact import Exact
from strategies.replicated import Replicated


class DDP(Exact, Replicated):
    """Lightning's distributed data parallel, started by fork on CPU; `--exact` can run on it."""

    def _on_several_devices(self) -> bool:
        return self.exact is None
