"""Several ranks that compute one replica between them, and know the same of it."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torchmetrics import Metric

from apprentice import replicas
from strategies.base.data_parallel import DataParallel

SYNCHRONISE = "It is recommended to use `self.log.*sync_dist=True"  # no need where all ranks have the same values


class SharedReplica(DataParallel):
    """Ranks of one replica have the same values: what is added up over replicas counts once, not once a rank."""

    def _read_whole(self, trainer: Trainer) -> None:
        """Have every rank read all batches, in the order of the user's own loader, with the same random numbers."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        # Lightning would put a sampler that shuffles in the place of the user's.
        trainer._accelerator_connector.use_distributed_sampler = False
        self._draw_alike()

    def _share_metrics(self, group: dist.ProcessGroup | None) -> None:
        """Have metrics count a replica's samples once."""
        assert self.lightning_module is not None
        for metric in (m for m in self.lightning_module.modules() if isinstance(m, Metric)):
            metric.process_group = group
            metric.to(self.root_device)

    # Predictions

    @property
    def _hands_over(self) -> bool:
        """Whether it is this rank's predictions that are returned and written, of those of its replica's ranks."""
        return self.is_global_zero

    def on_predict_start(self) -> None:
        """Have one rank of a replica hand over what all of them have predicted."""
        super().on_predict_start()
        if not self._hands_over:
            assert self.lightning_module is not None
            loop = self.lightning_module.trainer.predict_loop
            loop._predict_step = partial(_predict_for_others, loop, loop._predict_step)  # type: ignore[method-assign]

    def on_predict_end(self) -> None:
        """Take that back."""
        super().on_predict_end()
        assert self.lightning_module is not None
        vars(self.lightning_module.trainer.predict_loop).pop("_predict_step", None)

    # Sums

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, unless another group is given."""
        return super().reduce(tensor, _among(group), reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, unless another group is given."""
        return super().all_gather(tensor, _among(group), sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Whether all, or any, of the ranks decide so."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)


def _predict_for_others(loop: Any, predict: Callable, *args: Any) -> None:
    """Predict a batch that another rank hands over: no callback writes it here, and it is not kept."""
    trainer, callbacks, wanted = loop.trainer, loop.trainer.callbacks, loop._return_predictions
    trainer.callbacks = [callback for callback in callbacks if not isinstance(callback, BasePredictionWriter)]
    loop._return_predictions = False
    try:
        predict(*args)
    finally:
        trainer.callbacks, loop._return_predictions = callbacks, wanted


def _among(group: Any) -> Any:
    """The replicas, unless a group is named; Lightning names the world where its user named none."""
    return replicas.group() if group is None or group is dist.group.WORLD else group
