"""The exact mode: the same float32 bits on any number of devices.

A global batch is cut into N shards whose bounds don't depend on the number of devices; some rank computes each by
itself. Sums over shards are not rounded (gradients), or in the order of the shards (logged values, statistics).
"""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from apprentice.errors import BadInput
from strategies.base.data_parallel import DataParallel
from strategies.base.private import sync_module_states
from strategies.exact.evaluation import RoundRobin
from strategies.exact.fixed_point import MOST_ADDENDS
from strategies.exact.training import ShardedTraining


class PlainSteps:
    """Lets each rank compute its rows of a batch at once, as Lightning does.

    A strategy holds its steps and calls them where another way to run a batch would differ. `run` is what Lightning,
    or the strategy's other bases, would do.
    """

    shards: int | None = None  # into which a global batch is cut; None: each rank has its rows

    def __init__(self, strategy: DataParallel) -> None:
        self.strategy = strategy

    def setup_environment(self) -> None:
        """Prepare the process."""

    def setup(self, trainer: Trainer) -> None:
        """Prepare the Trainer."""

    def batch_to_device(self, run: Callable[..., Any], batch: Any, *args: Any) -> Any:
        return run(batch, *args)

    def training_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        return run(batch, *args, **kwargs)

    def start_evaluation(self) -> None:
        """Begin to count batches."""

    def evaluation_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        return run(batch, *args, **kwargs)

    def predict_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)


class ExactSteps(PlainSteps):
    """Cuts each global batch of training into `shards`, and evaluates whole batches round-robin."""

    training_class: ClassVar[type[ShardedTraining]] = ShardedTraining

    def __init__(self, strategy: DataParallel, shards: int) -> None:
        super().__init__(strategy)
        if not 1 <= shards <= MOST_ADDENDS:
            raise BadInput("exact", shards, f"a number of shards, 1 to {MOST_ADDENDS}")
        self.shards: int = shards
        self.training = self.training_class(strategy, shards)
        self.evaluation = RoundRobin(strategy)

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


class Exact(DataParallel):
    """Data parallelism that can be exact.

    It trains any LightningModule whose loss is a mean over the rows of its batch. `training_step` is called for each
    shard, so it must log the same names for each shard, keep no state between calls and call no collective. What it
    logs appears under the names, and is reduced by the `reduce_fx`, of Lightning on one device. A module that acts on
    a global batch's values offers `shard_step(batch) -> (loss, {name: (b,) values})`, called for each shard instead,
    and `on_global_batch(means, count) -> parameters that take no step`, called once. With a true `relates_rows` its
    `shard_step` may call `apprentice.relations.relate`, and is called twice.

    BatchNorm computes statistics of a shard. With such a layer a shard has at least 8 rows, or the whole batch; the
    other shards are empty. A module may ask for more rows by an attribute `fewest_rows`. BadInput: a module that
    can't be exact, or more devices than shards.

    Args:
        exact: number of shards of a batch, and the largest number of devices; None for plain data parallelism.
    """

    plain_steps: ClassVar[type[PlainSteps]] = PlainSteps
    exact_steps: ClassVar[type[ExactSteps]] = ExactSteps
    _has_trainer = False

    def __init__(self, *, exact: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.exact = exact

    @property
    def exact(self) -> int | None:
        """The number of shards of a batch, if it is cut; set it before the Trainer is made."""
        return self.steps.shards

    @exact.setter
    def exact(self, shards: int | None) -> None:
        if self._has_trainer:
            raise BadInput("exact", shards, "it to be set before the Trainer is made")
        self.steps = self.plain_steps(self) if shards is None else self.exact_steps(self, shards)

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.exact is not None and (replicas := self.replica[1]) > self.exact:
            raise self._fault(f"at least {replicas}, the number of devices")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._has_trainer = True
        if not self._needs_group:
            self._launcher = None

    @property
    def _needs_group(self) -> bool:
        return self.exact is None or self._num_ranks > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica if a batch is cut: every rank's loader yields the global batches."""
        return super().distributed_sampler_kwargs if self.exact is None else {"num_replicas": 1, "rank": 0}

    def setup_distributed(self) -> None:
        """Join the process group, unless a single process needs none; seed torch's generators in any case."""
        if self._needs_group:
            super().setup_distributed()
        else:
            reset_seed()
            self.set_world_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        self.steps.setup_environment()

    def setup(self, trainer: Trainer) -> None:
        self.check_module(self._module)
        self.steps.setup(trainer)
        if self._needs_group:
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)

    def check_module(self, module: LightningModule) -> None:
        super().check_module(module)
        if self.exact is None:
            return
        if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
            raise self._fault("automatic optimization and Lightning's own backward")
        if self._scales_loss:
            raise self._fault("another precision than 16-mixed, which scales the loss")

    def configure_ddp(self) -> None:
        """Wrap the module; without a wrapper, as a sum over shards needs none, ranks start with rank zero's states."""
        if self.exact is None:
            super().configure_ddp()
        else:
            sync_module_states(self._module)

    def _setup_model(self, model: nn.Module) -> Any:
        return super()._setup_model(model) if self.exact is None else model

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.steps.batch_to_device(super().batch_to_device, batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.training_step(super().training_step, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Begin to count batches."""
        self.steps.start_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.predict_step(super().predict_step, *args, **kwargs)
