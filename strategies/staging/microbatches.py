"""A batch in pieces, on its way down the pipeline."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from strategies.staging.parcels import Layout


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
    what = f"the stage that ends with {type(layer).__name__}"
    if wrong := [type(x).__name__ for x in tensors if not isinstance(x, Tensor)]:
        raise TypeError(f"{what}: expected a tensor or a tuple of tensors for the next stage, got {wrong[0]}")
    if uneven := [tuple(x.shape) for x in tensors if not x.dim() or len(x) != rows]:
        raise ValueError(f"{what}: expected tensors with the batch's {rows} rows first, got one of {uneven[0]}")
    return tensors


def detached(leaf: Any) -> Any:
    """A leaf of an output without its history."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
