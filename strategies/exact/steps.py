"""How a strategy runs batches in the exact mode."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from apprentice.errors import BadInput
from strategies.base.data_parallel import DataParallel
from strategies.base.steps import PlainSteps
from strategies.exact.evaluation import RoundRobin
from strategies.exact.fixed_point import MOST_ADDENDS
from strategies.exact.training import ShardedTraining


class ExactSteps(PlainSteps):
    """Cuts each global batch of training into `shards`, and evaluates whole batches round-robin."""

    needs_group = False
    training_class: ClassVar[type[ShardedTraining]] = ShardedTraining

    def __init__(self, strategy: DataParallel, shards: int) -> None:
        super().__init__(strategy)
        if not 1 <= shards <= MOST_ADDENDS:
            raise BadInput("exact", shards, f"a number of shards, 1 to {MOST_ADDENDS}")
        self.shards: int = shards
        self.training = self.training_class(strategy, shards)
        self.evaluation = RoundRobin(strategy)

    def check_devices(self) -> None:
        """Raise BadInput for more replicas than shards."""
        if (replicas := self.strategy.replica[1]) > self.shards:
            raise self.strategy._fault(f"at least {replicas}, the number of devices")

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput if the module can't be exact."""
        if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
            raise self.strategy._fault("automatic optimization and Lightning's own backward")
        if self.strategy._scales_loss:
            raise self.strategy._fault("another precision than 16-mixed, which scales the loss")

    def setup_environment(self) -> None:
        """Compute with one thread and deterministic kernels: the number of threads changes the bits."""
        self.strategy.undo.callback(torch.set_num_threads, torch.get_num_threads())
        self.strategy.undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.set_num_threads(1)
        if self.strategy.root_device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def setup(self, trainer: Trainer) -> None:
        """Let ranks evaluate in turn, with the same random states."""
        self.evaluation.replace_loops(trainer)
        self.strategy.undo.callback(self.training.clear)
        self.strategy._broadcast_random_states()

    def batch_to_device(self, run: Callable[..., Any], batch: Any, *args: Any) -> Any:
        """Move the rows of this rank's shards; in evaluation the batch, if it is this rank's."""
        if self.module.trainer.training:
            return run(self.training.cut(batch), *args)
        return run(batch, *args) if self.evaluation.is_mine() else batch

    def training_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the global batch, whose backward adds the gradients of all shards."""
        return self.training.step(batch, *args, **kwargs)

    def start_evaluation(self) -> None:
        """Begin with the first rank."""
        self.evaluation.start()

    def evaluation_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Validate or test a batch, if it is this rank's."""
        return self.evaluation.step(run, batch, *args, **kwargs)

    def predict_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Predict a batch."""
        with self.evaluation.isolate("predict_step"):
            return run(*args, **kwargs)
