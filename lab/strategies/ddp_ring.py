"""Data parallelism over the process-group backend `ring`."""

from typing import Any

from apprentice.errors import BadInput
from lab.strategies import ring
from strategies.ddp import DDP


class DDPRing(DDP):
    """DDP that sends gradients around a ring, from one rank to the next: see `lab/strategies/ring`.

    All else is `ddp`, including its options and `exact`. The ring needs tensors in a CPU's memory.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._refuse(kwargs, "process_group_backend")
        ring.register()
        super().__init__(process_group_backend=ring.NAME, **kwargs)

    def _check_devices(self) -> None:
        super()._check_devices()
        kind = self.root_device.type
        if kind != "cpu":
            raise BadInput("accelerator", kind, "cpu, as strategy ddp_ring sends from a CPU's memory")

    def setup_distributed(self) -> None:
        """Register the backend in this process, and join the process group."""
        ring.register()
        super().setup_distributed()
