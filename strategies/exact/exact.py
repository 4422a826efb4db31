"""The exact mode: the same float32 bits on any number of devices.

A global batch is cut into N shards whose bounds don't depend on the number of devices; some rank computes each by
itself. Sums over shards are not rounded (gradients), or in the order of the shards (logged values, statistics).
"""

from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn

from apprentice.errors import BadInput
from strategies.base.data_parallel import DataParallel
from strategies.base.private import sync_module_states
from strategies.base.steps import PlainSteps
from strategies.exact.steps import ExactSteps


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

    def __init__(self, *, exact: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.exact = exact

    @property
    def exact(self) -> int | None:
        """The number of shards of a batch, if it is cut; set it before the Trainer is made."""
        return self.steps.shards

    @exact.setter
    def exact(self, shards: int | None) -> None:
        if self._launcher is not None:
            raise BadInput("exact", shards, "it to be set before the Trainer is made")
        self.steps = self.plain_steps(self) if shards is None else self.exact_steps(self, shards)

    def _check_devices(self) -> None:
        super()._check_devices()
        self.steps.check_devices()

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if not self._needs_group:
            self._launcher = None

    @property
    def _needs_group(self) -> bool:
        return self.steps.needs_group or self._num_ranks > 1

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
        """Join the process group, and prepare the process."""
        super().setup_environment()
        self.steps.setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Set the Trainer and the module up."""
        self.check_module(self._module)
        self.steps.setup(trainer)
        if self._needs_group:
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput if the module can't be trained so."""
        super().check_module(module)
        self.steps.check_module(module)

    def configure_ddp(self) -> None:
        """Wrap the module; without a wrapper, as a sum over shards needs none, ranks start with rank zero's states."""
        if self.exact is None:
            super().configure_ddp()
        else:
            sync_module_states(self._module)

    def _setup_model(self, model: nn.Module) -> Any:
        return super()._setup_model(model) if self.exact is None else model

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the rows that this rank computes."""
        return self.steps.batch_to_device(super().batch_to_device, batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch."""
        return self.steps.training_step(super().training_step, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Begin to count batches."""
        self.steps.start_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate a batch."""
        return self.steps.evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch."""
        return self.steps.evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch."""
        return self.steps.predict_step(super().predict_step, *args, **kwargs)
