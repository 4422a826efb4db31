"""Several ranks that compute one replica between them, and know the same of it."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric

from apprentice import replicas
from strategies.base import DataParallel

SYNCHRONISE = "It is recommended to use `self.log.*sync_dist=True"  # no need where all ranks have the same values


class Agreeing(DataParallel):
    """Ranks of one replica have the same values: what is added up over replicas counts once, not once a rank."""

    def _read_whole(self, trainer: Trainer) -> None:
        """Have every rank read all batches, in the order of the user's own loader, drawn by one generator."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        # Lightning would put a sampler that shuffles in the place of the user's.
        trainer._accelerator_connector.use_distributed_sampler = False
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))

    def _share_metrics(self, group: dist.ProcessGroup | None) -> None:
        """Have metrics count a replica's samples once."""
        assert self.lightning_module is not None
        for metric in (m for m in self.lightning_module.modules() if isinstance(m, Metric)):
            metric.process_group = group
            metric.to(self.root_device)

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


def _among(group: Any) -> Any:
    """The replicas, unless a group is named; Lightning names the world where its user named none."""
    return replicas.group() if group is None or group is dist.group.WORLD else group
