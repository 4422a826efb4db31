"""Data parallelism by hand: average the gradients after backward, as PyTorch's distributed tutorial, in buckets."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from apprentice.errors import BadInput
from strategies.base.gradients import Buckets
from strategies.base.private import sync_module_states
from strategies.ddp import AveragesGradients


class AllReduce(AveragesGradients):
    """Synchronous SGD without DistributedDataParallel: all of it is on this page and in `gradients.Buckets`.

    DDP sends a bucket while backward computes the next; here all buckets are sent after backward, so communication is
    not hidden. Accumulated batches are sent once, with the last of them. Manual optimization averages after each
    backward. Evaluation uses rank zero's buffers, such as the statistics of a plain BatchNorm.

    Args:
        bucket_cap_mb: MiB of gradients that are sent together.
    """

    _saves_alone = True
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
        self._average_more()

    def _average_more(self, batch_idx: int = 0) -> None:
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
