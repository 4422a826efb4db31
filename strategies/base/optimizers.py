"""Optimizers of a Trainer whose ranks were forked: those of the last fit are created when somebody asks for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer


class DeferredOptimizers(DDPStrategy):
    """Lightning's DDPStrategy, with `optimizers` and `lr_scheduler_configs` that can be created on first access."""

    _create: Callable[[], None] | None = None

    def defer_optimizers(self, create: Callable[[], None]) -> None:
        """Call `create`, which sets `optimizers` and `lr_scheduler_configs`, when somebody asks for one of them."""
        self._create = create

    def _created(self) -> None:
        create, self._create = self._create, None  # what it calls may ask for them, too
        try:
            if create is not None:
                create()
        except BaseException:
            self._create = create
            raise

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the current fit or of the last one."""
        self._created()
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._create = None
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """Those of the current fit or of the last one."""
        self._created()
        return self._lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[LRSchedulerConfig]) -> None:
        self._lr_scheduler_configs = configs

    @contextmanager
    def without_optimizers(self, restore: bool) -> Iterator[None]:
        """Drop an earlier fit's optimizers inside, as new ranks have no use for them, and restore them on demand."""
        create, self._create = self._create, None
        optimizers, configs = self.optimizers, self.lr_scheduler_configs
        self.optimizers, self.lr_scheduler_configs = [], []
        try:
            yield
        finally:
            if restore:
                self.optimizers, self.lr_scheduler_configs, self._create = optimizers, configs, create
