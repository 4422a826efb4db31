"""Data parallelism with compressed gradients, by torch's communication hooks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from apprentice.errors import BadInput
from strategies.ddp import DDP, SET_BY_HOOK


class DDPFP16(DDP):
    """Sends gradients as 16-bit floats: half the bytes, and three digits."""

    _relates_rows = False

    def __init__(self, **kwargs: Any) -> None:
        self._refuse(kwargs, *SET_BY_HOOK)
        super().__init__(exact=None, ddp_comm_hook=fp16_compress_hook, **kwargs)


class DDPPowerSGD(DDP):
    """Sends gradients of matrices as low-rank factors (Vogels et al. 2019, "PowerSGD", algorithm 2).

    The error of a step is added to the next gradient. Each rank keeps its own errors, in no checkpoint: they start anew
    after a resume, and when a layer is unfrozen, then with `start_step` steps of whole gradients.

    Args:
        rank: of the factors; more is closer and costs more.
        start_step: steps with whole gradients at the start; at least 2.
    """

    _relates_rows = False

    def __init__(self, *, rank: int = 1, start_step: int = 10, **kwargs: Any) -> None:
        self._refuse(kwargs, *SET_BY_HOOK)
        super().__init__(exact=None, ddp_comm_hook=_bucket_by_bucket, **kwargs)
        if rank < 1:
            raise BadInput("rank", rank, "at least 1")
        if start_step < 2:
            raise BadInput("start_step", start_step, "at least 2")
        self.rank, self.start_step = rank, start_step

    def _register_ddp_hooks(self) -> None:
        self._ddp_comm_state = PowerSGDState(None, self.rank, self.start_step)
        super()._register_ddp_hooks()


def _bucket_by_bucket(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = powerSGD_hook(state, bucket)
    # It sends in several rounds. With gloo their order differs between ranks, and the process dies of the mismatch.
    if bucket.buffer().device.type == "cpu":
        future.wait()
    return future
