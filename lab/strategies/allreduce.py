"""Data parallelism by hand: average the gradients after backward, as PyTorch's distributed tutorial, in buckets."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from apprentice.errors import BadInput
from strategies.base.gradients import pack, unpack
from strategies.base.private import sync_module_states
from strategies.ddp import AveragesGradients


class Buckets:
    """Groups of parameters of one type and device with at most `cap_mb` MiB, or one parameter, to be sent together."""

    def __init__(self, parameters: Iterable[nn.Parameter], cap_mb: float) -> None:
        self.buckets: list[list[nn.Parameter]] = []
        kinds = {p: f"{p.dtype} {p.device}" for p in parameters}
        for p in sorted(kinds, key=kinds.__getitem__):  # stable: else in their order
            last = self.buckets[-1] if self.buckets else []
            if last and kinds[last[0]] == kinds[p] and sum(x.nbytes for x in [*last, p]) <= cap_mb * 2**20:
                last.append(p)
            else:
                self.buckets.append([p])

    @torch.no_grad()
    def average(self) -> None:
        """Replace each gradient by its mean over the ranks; None counts as zeros where another rank has a gradient."""
        if (world_size := dist.get_world_size()) == 1:
            return
        messages = []
        for bucket in self.buckets:  # one is filled while others are sent
            # Divided before the sum, as DDP does: a sum of 16-bit floats may overflow.
            vector = pack({p: p.grad for p in bucket}).div_(world_size)
            messages.append((bucket, vector, dist.all_reduce(vector, async_op=True)))
        for bucket, vector, work in messages:
            assert work is not None
            work.wait()
            for p, mean in unpack(vector, bucket).items():
                if mean is not None:
                    p.grad = torch.empty_like(p) if p.grad is None else p.grad
                    p.grad.copy_(mean)


class AllReduce(AveragesGradients):
    """Synchronous SGD without DistributedDataParallel: all of it is on this page.

    DDP sends a bucket while backward computes the next; here all buckets are sent after backward, so communication is
    not hidden. Accumulated batches are sent once, with the last of them. Manual optimization averages after each
    backward. Evaluation uses rank zero's buffers, such as the statistics of a plain BatchNorm.

    Args:
        bucket_cap_mb: MiB of gradients that are sent together.
    """

    saves_alone = True
    _buckets: Buckets

    def __init__(self, *, bucket_cap_mb: float = 25.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not bucket_cap_mb > 0:
            raise BadInput("bucket_cap_mb", bucket_cap_mb, "MiB, above 0")
        self.bucket_cap_mb = bucket_cap_mb
        self._accumulates = False

    def configure_ddp(self) -> None:
        """Start with rank zero's weights."""
        sync_module_states(self._module)
        self._averaged = None
        self._average_unfrozen()

    def _average_unfrozen(self, batch_idx: int = 0) -> None:
        self._averaged = self._ever_trained()
        self._buckets = Buckets((p for p in self._module.parameters() if p in self._averaged), self.bucket_cap_mb)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging inside the block."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients and average them before hooks and clipping."""
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
        if not self._accumulates:
            self._buckets.average()
        return self.precision_plugin.post_backward(loss, self._module)

    def on_validation_start(self) -> None:
        """Evaluate with rank zero's buffers."""
        self._broadcast_buffers()

    on_test_start = on_predict_start = on_validation_start
