"""Data parallelism by hand: after backward the gradients are averaged. The distributed tutorial's own, in buckets."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.base.buckets import Buckets
from strategies.base.data_parallel import DataParallel


class AllReduce(DataParallel):
    """Synchronous SGD without DistributedDataParallel: all that it does is on this page and in `buckets`.

    All ranks start with rank zero's weights, each computes the gradients of its share of a batch, and all take the same
    step by their mean. DDP sends a bucket while backward still computes the next; here they are sent when backward is
    done, so nothing is hidden. Batches that are accumulated are sent once, with the last of them. Under manual
    optimization gradients are averaged after every backward.

    Statistics that a rank keeps of its own, as plain BatchNorm's, are rank zero's in an evaluation.

    Args:
        bucket_cap_mb: MiB of gradients that are sent together.
        **kwargs: DataParallel's.

    Raises:
        ValueError: an option's value can't be used.
    """

    def __init__(self, *, bucket_cap_mb: float = 25.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb {bucket_cap_mb}: expected MiB, above 0")
        self.bucket_cap_mb = bucket_cap_mb
        self._buckets: Buckets | None = None
        self._accumulates = False

    def configure_ddp(self) -> None:
        """Begin with rank zero's weights, and make room for the gradients."""
        assert self.lightning_module is not None
        _sync_module_states(self.lightning_module)
        self._make_room()

    def _make_room(self) -> None:
        assert self.lightning_module is not None
        self._averaged = self._ever_trained()
        in_order = [p for p in self.lightning_module.parameters() if p in self._averaged]
        self._buckets = Buckets(in_order, self.bucket_cap_mb)

    def _average_more(self, batch_idx: int) -> None:
        self._make_room()

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside the block gradients are only added to those that are there."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients, and average them before any hook or clipping sees them."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        if not self._accumulates:
            assert self._buckets is not None
            self._buckets.average()
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def on_validation_start(self) -> None:
        """Validate with rank zero's statistics."""
        self._share_buffers()

    on_test_start = on_predict_start = on_validation_start

    def teardown(self) -> None:
        """Let go of the gradients' room."""
        self._buckets = None
        super().teardown()
