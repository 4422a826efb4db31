"""What a loop does beside training its runs on the data's batches: the port, whose methods do nothing by default."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from apprentice.batch import Batch
from apprentice.contract import ModuleLayout

if TYPE_CHECKING:
    from lit_modules.tasks.base import BatchSize
    from lit_modules.training.loop import Loop

L = TypeVar("L", bound="Loop")  # the kind of loop that it serves

Values = dict[str, Tensor]  # (b,) by `<run>/<what>`


class MoreLosses(NamedTuple):
    """What is added to a step's loss."""

    loss: Tensor  # ()
    values: Values  # in place of those of the same names, if there are


class Extra(Generic[L]):
    """Something that a loop holds beside its runs, such as averages of their weights.

    Attributes:
        saved: attributes that a checkpoint holds.
    """

    saved: tuple[str, ...] = ()

    def add_to_layout(self, loop: L, layout: ModuleLayout) -> ModuleLayout:
        """Return the layout of a loop with what this needs of strategies."""
        return layout

    def check_data(self, loop: L, data: Any) -> None:
        """Raise BadInput if the runs can't learn from a data module."""

    def on_train_start(self, loop: L) -> None:
        """Begin a training."""

    def on_train_end(self, loop: L) -> None:
        """Free what training alone needs."""

    def on_batch_start(self, loop: L) -> None:
        """Prepare a global batch."""

    @contextmanager
    def watch(self, loop: L, batch: Batch) -> Iterator[Callable[[], list[MoreLosses]]]:
        """Inside, some rows of a global batch pass the nets; the function returns what they then add to the loss."""
        yield list

    def runs_elsewhere(self, loop: L) -> Collection[str]:
        """Return the runs that learn from other batches than the data's in this step."""
        return ()

    def sizes_elsewhere(self, loop: L) -> Mapping[str, int]:
        """Return of these runs how many values each mean over the global batch is of."""
        return {}

    def timed_batches(self, loop: L, run: str, batch: Batch) -> list[Batch]:
        """Return the batches that a run learns from in place of this one, in a step by itself; [] for no other."""
        return []

    def on_global_batch(self, loop: L, size: "BatchSize") -> None:
        """Take note of a global batch whose losses are computed."""

    def on_before_backward(self, loop: L, loss: Tensor) -> None:
        """Change gradients of an accumulated batch."""

    def before_step(self, loop: L) -> None:
        """Change the accumulated gradients."""

    def after_batch(self, loop: L) -> None:
        """Act when a batch is done, before a validation."""


@runtime_checkable
class BringsExtra(Protocol):
    """A layer of a net for which a loop needs something.

    Attributes:
        brings_extra: import path of an `Extra` whose class method `of` returns it for a loop, in a list; [] for none.
    """

    brings_extra: str


def extras_of_nets(loop: "Loop") -> list[Extra[Any]]:
    """Return what the layers of a loop's nets need, such as the loss that balances a mixture's experts."""
    layers = (layer for run in loop.runs for layer in loop.net_of(run).modules())
    paths = dict.fromkeys(layer.brings_extra for layer in layers if isinstance(layer, BringsExtra))
    return [extra for path in paths for extra in resolve_name(path).of(loop)]
