"""Several ranks that compute one replica together, and hold the same values."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torchmetrics import Metric

from apprentice import replicas
from strategies.base.data_parallel import DataParallel

SYNCHRONISE = "It is recommended to use `self.log.*sync_dist=True"  # needless where all ranks have the same values


class SharedReplica(DataParallel):
    """Ranks of one replica hold the same values, which sums over replicas count once a replica, not once a rank."""

    def _read_whole_batches(self, trainer: Trainer) -> None:
        """Let every rank read all batches, in the order of the user's loader, with the same random numbers."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        # Lightning would replace the user's sampler by one that shuffles.
        trainer._accelerator_connector.use_distributed_sampler = False
        self._broadcast_random_states()

    def _set_metrics_group(self, group: dist.ProcessGroup | None) -> None:
        """Reduce metrics over a group, such as one that has each sample once."""
        for metric in (m for m in self._module.modules() if isinstance(m, Metric)):
            metric.process_group = group
            metric.to(self.root_device)

    @property
    def _returns_predictions(self) -> bool:
        """Whether this rank returns and writes its replica's predictions."""
        return self.is_global_zero

    def on_predict_start(self) -> None:
        """Return and write predictions on one rank of each replica."""
        super().on_predict_start()
        if not self._returns_predictions:
            loop = self._trainer.predict_loop
            loop._predict_step = partial(_predict_silently, loop, loop._predict_step)  # type: ignore[method-assign]

    def on_predict_end(self) -> None:
        """Restore the loop."""
        super().on_predict_end()
        vars(self._trainer.predict_loop).pop("_predict_step", None)

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
