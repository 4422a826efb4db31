"""Several ranks that compute one replica together, and hold the same values."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torchmetrics import Metric

from apprentice import replicas
from strategies.base.data_parallel import DataParallel

SYNCHRONISE = "It is recommended to use `self.log.*sync_dist=True"  # needless where all ranks have the same values


class SharedReplica(DataParallel):
    """Ranks of one replica hold the same values, which sums over replicas count once a replica, not once a rank."""

    _has_whole_nets = False

    @property
    def replica_size(self) -> int:
        """The number of ranks that compute a replica together; they follow one another."""
        return self._num_ranks

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica of the module, and the number of replicas."""
        return self.global_rank // self.replica_size, self._num_ranks // self.replica_size

    def _read_whole_batches(self, trainer: Trainer) -> None:
        """Let every rank read all batches, in the order of the user's loader, with the same random numbers."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        # Lightning would replace the user's sampler by one that shuffles.
        trainer._accelerator_connector.use_distributed_sampler = False
        self._broadcast_random_states()

    def _reduce_metrics(self, group: dist.ProcessGroup | None) -> None:
        """Reduce metrics over a group, such as one that has each sample once, until the teardown."""
        for metric in (m for m in self._module.modules() if isinstance(m, Metric)):
            self.undo.callback(setattr, metric, "process_group", None)
            metric.process_group = group
            metric.to(self.root_device)

    def _refuse_averaging(self, trainer: Trainer) -> None:
        """Raise BadInput for callbacks that average weights, of which each rank has some."""
        averaging = StochasticWeightAveraging, WeightAveraging
        self._refuse_callbacks(trainer, averaging, "none that averages weights, which no rank has all of")

    def on_predict_start(self) -> None:
        """Return and write predictions on the first rank of each replica."""
        super().on_predict_start()
        if self.global_rank % self.replica_size:
            loop = self._trainer.predict_loop
            self.replace(loop, "_predict_step", partial(_predict_silently, loop, loop._predict_step))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, unless another group is given."""
        return super().reduce(tensor, _group(group), reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, unless another group is given."""
        return super().all_gather(tensor, _group(group), sync_grads)


def _predict_silently(loop: Any, predict: Callable[..., None], *args: Any) -> None:
    """Predict a batch without writing or keeping it, as another rank does."""
    trainer, callbacks, returns = loop.trainer, loop.trainer.callbacks, loop._return_predictions
    trainer.callbacks = [callback for callback in callbacks if not isinstance(callback, BasePredictionWriter)]
    loop._return_predictions = False
    try:
        predict(*args)
    finally:
        trainer.callbacks, loop._return_predictions = callbacks, returns


def _group(group: Any) -> Any:
    """Return the replicas' group for None and for the world, which Lightning names where its user named none."""
    return replicas.group() if group is None or group is dist.group.WORLD else group
