"""A batch in pieces, on its way down the pipeline."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from strategies.pipeline.buffers import Layout


class Event(NamedTuple):
    """What a rank computed when.

    Attributes:
        stage: number of the stage.
        microbatch: number of the micro-batch.
        kind: "forward", "backward", or "weights" where a schedule computes their gradients apart.
        start: seconds of the machine's monotonic clock.
        stop: likewise.
    """

    stage: int
    microbatch: int
    kind: str
    start: float
    stop: float


@dataclass
class MicroBatch:
    """Some rows of a batch.

    Attributes:
        rows: how many; with none, nothing is computed.
        inputs: what the first stage is called with.
        loss: from the last stage's output to a scalar, weighted as it counts; None to go forward only.
        context: in which every stage computes it.
    """

    rows: int
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor] | None
    context: Callable[[], AbstractContextManager]


def _ignore(*_: int) -> None:
    pass


@dataclass
class Step:
    """A batch on its way down the pipeline.

    Attributes:
        microbatches: in order.
        computed: called with the stage when gradients of its parameters are there.
        went_forward: called with stage and micro-batch when the stage has computed it.
        outputs: by micro-batch, what the last stage gave.
        losses: by micro-batch, on the last stage.
        events: what was computed when.
    """

    microbatches: Sequence[MicroBatch]
    computed: Callable[[int], None] = _ignore
    went_forward: Callable[[int, int], None] = _ignore
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def recorded(self, stage: int, number: int, kind: str) -> Iterator[None]:
        """Note when the block is computed; on a GPU that is when its kernels are queued."""
        start = time.perf_counter()
        yield
        self.events.append(Event(stage, number, kind, start, time.perf_counter()))


class Form(NamedTuple):
    """What an output looks like: a tree with tensors for leaves."""

    spec: TreeSpec
    others: dict[int, Any]
    layouts: list[Layout]

    @classmethod
    def of(cls, output: Any) -> "Form":
        """The form of an output."""
        leaves, spec = tree_flatten(output)
        others = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        return cls(spec, others, [Layout.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)])

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with these tensors."""
        rest = iter(tensors)
        count = len(self.layouts) + len(self.others)
        return tree_unflatten([self.others[i] if i in self.others else next(rest) for i in range(count)], self.spec)


def travelling(output: Any, layer: nn.Module, rows: int) -> tuple[Tensor, ...]:
    """The tensors that a stage gives to the next.

    Raises:
        TypeError: it gives something else.
        ValueError: tensors whose first dimension is not the batch's.
    """
    tensors = output if type(output) is tuple else (output,)
    if wrong := [type(x).__name__ for x in tensors if not isinstance(x, Tensor)]:
        raise TypeError(f"{_that(layer)}: expected a tensor or a tuple of tensors for the next stage, got {wrong[0]}")
    _check_rows(tensors, layer, rows)
    return tensors


def given(output: Any, layer: nn.Module, rows: int) -> Any:
    """What the last stage gives, without its history.

    Raises:
        ValueError: there are tensors whose first dimension is not the batch's.
    """
    _check_rows([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], layer, rows)
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _check_rows(tensors: Iterable[Tensor], layer: nn.Module, rows: int) -> None:
    if uneven := [tuple(x.shape) for x in tensors if not x.dim() or len(x) != rows]:
        expected = f"expected tensors with the batch's {rows} rows first"
        raise ValueError(f"{_that(layer)}: {expected}, got one of {uneven[0]}")


def _that(layer: nn.Module) -> str:
    return f"the stage that ends with {type(layer).__name__}"
