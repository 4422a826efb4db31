"""The exact mode: the same float32 bits on any number of devices.

A global batch is cut into N shards whose bounds don't depend on the number of devices; some rank computes each by
itself. Sums over shards are not rounded (gradients), or in the order of the shards (logged values, statistics).
"""

import os
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from apprentice.relations import ShardedRelations
from strategies.base.private import sync_module_states
from strategies.exact.fixed_point import MOST_ADDENDS
from strategies.exact.training import ShardedTraining


class Exact(ShardedTraining):
    """Data parallelism that can be exact.

    It trains any LightningModule whose loss is a mean over the rows of its batch. `training_step` is called for each
    shard, so it must log the same names for each shard, keep no state between calls and call no collective. What it
    logs appears under the names, and is reduced by the `reduce_fx`, of Lightning on one device. A module that acts on
    a global batch's values offers `shard_step(batch) -> (loss, {name: (b,) values})`, called for each shard instead,
    and `on_global_batch(means, count) -> parameters that take no step`, called once. With a true `relates_rows` its
    `shard_step` may call `apprentice.relations.related`, and is called twice.

    BatchNorm computes statistics of a shard. With such a layer a shard has at least 8 rows, or the whole batch; the
    other shards are empty. A module may ask for more rows by an attribute `fewest_rows`. ValueError: a module that
    can't be exact, or more devices than shards.

    Args:
        exact: number of shards of a batch, and the largest number of devices; None for plain data parallelism.
    """

    def __init__(self, *, exact: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if exact is not None and not 1 <= exact <= MOST_ADDENDS:
            raise ValueError(f"exact {exact}: expected a number of shards, 1 to {MOST_ADDENDS}")
        self.exact = exact
        self._sums, self._spans, self._logs = [], [], []
        self._relations = ShardedRelations(0)
        self._undo = ExitStack()

    @property
    def _needs_no_group(self) -> bool:
        return self.exact is not None and self._num_ranks == 1

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.exact is not None and (replicas := self.replica[1]) > self.exact:
            raise ValueError(f"exact {self.exact}: expected at least {replicas}, the number of devices")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._needs_no_group:
            self._launcher = None

    def setup_distributed(self) -> None:
        """Join the process group, unless there is one process; seed torch's generators in any case."""
        if self._needs_no_group:
            reset_seed()
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def setup_environment(self) -> None:
        """Compute with one thread and deterministic kernels: the number of threads changes the bits."""
        super().setup_environment()
        if self.exact is not None:
            self._undo.callback(torch.set_num_threads, torch.get_num_threads())
            self._undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.set_num_threads(1)
        if self.exact is not None and self.root_device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def teardown(self) -> None:
        """Restore threads, kernels and loops."""
        super().teardown()
        self._sums = []
        self._undo.close()

    def setup(self, trainer: Trainer) -> None:
        """Set the module up; under `exact` without a wrapper, as its gradients are not averaged as floats."""
        if self.exact is not None:
            self.check_module(self._module)
            self._replace_loops(trainer)
            self._broadcast_random_states()
        if self._needs_no_group:
            Strategy.setup(self, trainer)
        else:
            super().setup(trainer)

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError if the module can't be exact."""
        super().check_module(module)
        manual = not module.automatic_optimization or is_overridden("backward", module, LightningModule)
        if self.exact is not None and manual:
            raise ValueError(f"exact {self.exact}: expected automatic optimization and Lightning's own backward")
        if self.exact is not None and self._scales_loss:
            raise ValueError(f"exact {self.exact}: expected another precision than 16-mixed, which scales the loss")

    def configure_ddp(self) -> None:
        """Wrap the module; under `exact` only copy rank zero's states."""
        if self.exact is None:
            super().configure_ddp()
        else:
            sync_module_states(self._module)

    def _setup_model(self, model: nn.Module) -> Any:
        return super()._setup_model(model) if self.exact is None else model

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas and rank; under `exact` every rank's loader yields the global batches."""
        rank, replicas = (0, 1) if self.exact is not None else self.replica
        return {"num_replicas": replicas, "rank": rank}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the rows that this rank computes."""
        if self.exact is not None:
            if self._module.trainer.training:
                batch = self._split_batch(batch, self.exact)
            elif not self._is_mine():
                return batch
        return super().batch_to_device(batch, device, dataloader_idx)
