"""Data parallelism: each rank holds the whole model, and gradients are averaged."""

from strategies.base.replicated import Replicated
from strategies.exact import Exact


class DDP(Exact, Replicated):
    """Lightning's distributed data parallel, forked on CPU; supports `--exact`."""

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.exact is not None and self._ddp_comm_hook is not None:
            raise ValueError(f"exact {self.exact}: expected no ddp_comm_hook, as gradients are added as whole numbers")

    def _on_several_devices(self) -> bool:
        return self.exact is None
