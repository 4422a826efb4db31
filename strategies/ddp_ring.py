"""Data parallelism over the project's own process-group backend."""

from typing import Any

from strategies import ring
from strategies.ddp import DDP


class DDPRing(DDP):
    """DDP whose gradients go around a ring, by messages from one rank to the next: see `strategies/ring`.

    Everything else is `ddp`, its options and `--exact` too. The ring sends from a CPU's memory.

    Args:
        **kwargs: DDP's, but for the backend.

    Raises:
        ValueError: the devices are no CPUs.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._refuse(kwargs, "process_group_backend")
        super().__init__(process_group_backend=ring.NAME, **kwargs)

    def _check_devices(self) -> None:
        super()._check_devices()
        kind = self.root_device.type
        if kind != "cpu":
            raise ValueError(f"accelerator {kind}: expected cpu, as strategy ddp_ring sends from a CPU's memory")

    def setup_distributed(self) -> None:
        """Make the backend known to torch in this process, and join the process group."""
        ring.register()
        super().setup_distributed()
