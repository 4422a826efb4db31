"""Data parallelism with compressed gradients, through torch's own communication hooks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from strategies.base.replicated import HOOK, Replicated


class DDPFP16(Replicated):
    """Gradients travel as 16-bit floats: half the bytes, and three digits."""

    def __init__(self, **kwargs: Any) -> None:
        self._refuse(kwargs, *HOOK)
        super().__init__(ddp_comm_hook=fp16_compress_hook, **kwargs)


class DDPPowerSGD(Replicated):
    """Gradients of matrices travel as factors of low rank (Vogels et al. 2019, "PowerSGD", algorithm 2).

    What a step leaves out is added to the next one's gradient; that memory is a rank's own and in no checkpoint, so a
    resumed run starts with none. So does one in which a layer is unfrozen, from there on, with whole gradients again.

    Args:
        rank: of the factors; more is closer and costs more.
        start_step: gradients travel whole before; at least 2.
        **kwargs: Replicated's.

    Raises:
        ValueError: an option's value can't be used.
    """

    def __init__(self, *, rank: int = 1, start_step: int = 10, **kwargs: Any) -> None:
        self._refuse(kwargs, *HOOK)
        super().__init__(ddp_comm_hook=_in_turn, **kwargs)
        if rank < 1:
            raise ValueError(f"rank {rank}: expected at least 1")
        if start_step < 2:
            raise ValueError(f"start_step {start_step}: expected at least 2")
        self.rank, self.start_step = rank, start_step

    def _register_ddp_hooks(self) -> None:
        self._ddp_comm_state = PowerSGDState(
            process_group=None, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.start_step
        )
        super()._register_ddp_hooks()


def _in_turn(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook, one bucket after another where that matters.

    It sends in several rounds, each begun when the one before has ended; with gloo that is another order on each rank
    as soon as there are two buckets, and the process dies of the mismatch. With NCCL the order is that of the calls.
    """
    future = powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        future.wait()
    return future
