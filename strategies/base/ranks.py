"""What launchers, and the hooks of a failed fit, use of the strategy whose ranks they start."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from strategies.base import rendezvous


class RankStrategy(DDPStrategy):
    """Lightning's DDPStrategy with what a process needs that starts ranks, and trains again after they have ended."""

    cluster_environment: ClusterEnvironment
    _timeout: timedelta
    saves_alone = False  # whether rank zero holds all that is in a checkpoint, without the other ranks
    create_optimizers: Callable[[], None] | None = None  # makes a finished fit's optimizers and schedulers on demand
    missing: BaseException | None = None  # names ranks that stopped responding before this one left the group

    def __init__(self, *from_trainer: Any, init_method: str | None, **options: Any) -> None:
        super().__init__(*from_trainer, **options)
        self.undo = ExitStack()  # of what a setup has changed; `teardown` closes it
        self.init_method = init_method
        self._socket: socket.socket | None = None  # of rank 0's store, bound before ranks are started here

    @property
    def _timeout_seconds(self) -> float:
        """How long a rank may keep the others waiting."""
        return self._timeout.total_seconds()

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput where the strategy can't train the module; called before a fork and in each rank."""

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise BadInput where the strategy can't keep the Trainer's settings; called with `check_module`."""

    def bind(self) -> None:
        """Bind rank 0's port before ranks are started, so that no other run on this machine can take it."""
        if self.init_method in rendezvous.BY_ENVIRONMENT:
            self._socket = rendezvous.bind_master_port(self.cluster_environment)

    def close_socket(self) -> None:
        """Close this process's copy of the socket; rank 0's store has its own."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def replace(self, owner: object, name: str, value: Any) -> None:
        """Hide an attribute of an object's class, such as a method, until the teardown."""
        self.undo.callback(vars(owner).pop, name, None)
        setattr(owner, name, value)

    def teardown(self) -> None:
        """Undo what the setup has changed."""
        try:
            self.undo.close()
        finally:
            super().teardown()

    # Optimizers of the last fit, which the process that forked its ranks makes on demand

    def _create_pending(self) -> None:
        create, self.create_optimizers = self.create_optimizers, None  # what it calls may ask for them, too
        try:
            if create is not None:
                create()
        except BaseException:
            self.create_optimizers = create
            raise

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the current fit or of the last one."""
        self._create_pending()
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self.create_optimizers = None
        vars(Strategy)["optimizers"].__set__(self, optimizers)

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        self._create_pending()
        return self._lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[LRSchedulerConfig]) -> None:
        self._lr_scheduler_configs = configs

    @contextmanager
    def without_optimizers(self, restore: bool) -> Iterator[None]:
        """Drop an earlier fit's optimizers inside, as new ranks have no use for them, and restore them on demand."""
        create, self.create_optimizers = self.create_optimizers, None
        optimizers, configs = self.optimizers, self.lr_scheduler_configs
        self.optimizers, self.lr_scheduler_configs = [], []
        try:
            yield
        finally:
            if restore:
                self.optimizers, self.lr_scheduler_configs, self.create_optimizers = optimizers, configs, create
