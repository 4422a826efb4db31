"""The exact mode: the same float32 bits on any number of devices.

A global batch is cut into N shards whose bounds don't depend on the number of devices; some rank computes each by
itself. Sums over shards are not rounded (gradients), or in the order of the shards (logged values, statistics).
"""

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from apprentice.errors import BadInput
from strategies.base.data_parallel import DataParallel
from strategies.base.steps import PlainSteps
from strategies.exact.evaluation import RoundRobin
from strategies.exact.fixed_point import MOST_ADDENDS
from strategies.exact.shards import fewest_rows, spans
from strategies.exact.training import ShardedTraining, try_step


class ExactSteps(PlainSteps):
    """Cuts each global batch of training into `shards`, and evaluates whole batches round-robin.

    It trains any LightningModule whose loss is a mean over the rows of its batch. `training_step` is called for each
    shard, so it must log the same names for each shard, keep no state between calls and call no collective. What it
    logs appears under the names, and is reduced by the `reduce_fx`, of Lightning on one device. A module that acts on
    a global batch's values has the methods of `apprentice.contract.HasShardStep`, of which one is called for each
    shard instead, the other once. If its layout relates rows, `shard_step` is called twice.

    BatchNorm computes statistics of a shard. With such a layer a shard has at least 8 rows, or the whole batch; the
    other shards are empty. A module's layout may ask for more rows.

    Args:
        strategy: that holds these steps, for all sums over its ranks.
        shards: number of shards of a batch, and the largest number of devices.

    Raises:
        BadInput: a number that can't be used; later, a module that can't be exact, or more devices than shards.
    """

    shards: int
    has_own_rows = False  # every rank's loader yields the global batches
    training_class: ClassVar[type[ShardedTraining]] = ShardedTraining

    def __init__(self, strategy: DataParallel, shards: int) -> None:
        if not 1 <= shards <= MOST_ADDENDS:
            raise BadInput("exact", shards, f"a number of shards, 1 to {MOST_ADDENDS}")
        self.strategy, self.shards = strategy, shards
        self.training = self.training_class(strategy, shards)

    @cached_property
    def evaluation(self) -> RoundRobin:
        """What evaluates whole batches."""
        return RoundRobin(self.strategy)

    def needs_group(self) -> bool:
        return self.strategy._num_ranks > 1

    def check_devices(self) -> None:
        if (replicas := self.strategy.replica[1]) > self.shards:
            raise self.strategy._fault(f"at least {replicas}, the number of devices")

    def check_module(self, module: LightningModule) -> None:
        if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
            raise self.strategy._fault("automatic optimization and Lightning's own backward")
        if self.strategy._scales_loss:
            raise self.strategy._fault("another precision than 16-mixed, which scales the loss")

    def first_shard(self, module: LightningModule, count: int) -> tuple[int, int]:
        """Return the first row, and the last + 1, of a global batch's first shard."""
        return spans(count, self.shards, fewest_rows(module))[0]

    def check_step(self, module: LightningModule, batch: Any) -> None:
        """Raise BadInput for what only a step shows; `module` has a `shard_step`, to which `batch` is a shard."""
        try_step(self.strategy, module, batch)

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
        if self.strategy._trainer.training:
            return run(self.training.cut(batch), *args)
        return run(batch, *args) if self.evaluation.is_mine() else batch

    def training_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the global batch, whose backward adds the gradients of all shards."""
        return self.training.step(batch, *args, **kwargs)

    def start_evaluation(self) -> None:
        self.evaluation.start()

    def evaluation_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.evaluation.step(run, batch, *args, **kwargs)

    def predict_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.evaluation.isolate("predict_step"):
            return run(*args, **kwargs)
