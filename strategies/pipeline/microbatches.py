"""The micro-batches of a batch, and what stages return for them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.private import tree_leaves


class Event(NamedTuple):
    """When a rank computed a micro-batch."""

    stage: int
    microbatch: int
    kind: str  # "forward", "backward", or "weights" if a schedule computes their gradients separately
    start: float  # seconds of the machine's monotonic clock; on a GPU, when kernels are queued
    stop: float


@dataclass
class MicroBatch:
    """Some rows of a batch."""

    rows: int  # 0: stages compute nothing
    inputs: tuple[Tensor, ...]  # of the first stage
    loss: Callable[[Any], Tensor] | None  # from the last stage's output to a weighted scalar; None for forward only
    context: Callable[[], AbstractContextManager[None]]  # each stage enters it


@dataclass
class PipelineStep:
    """One pass of a batch through the pipeline."""

    microbatches: Sequence[MicroBatch]
    after_backward: Callable[[int], None] = lambda _stage: None
    after_forward: Callable[[int, int], None] = lambda _stage, _microbatch: None
    outputs: dict[int, Any] = field(default_factory=dict)  # the last stage's, by micro-batch
    losses: dict[int, Tensor] = field(default_factory=dict)  # likewise
    events: list[Event] = field(default_factory=list)  # of this rank

    @contextmanager
    def record(self, stage: int, number: int, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.events.append(Event(stage, number, kind, start, time.perf_counter()))


def check_output(output: Any, layer: nn.Module, rows: int) -> None:
    """Raise BadInput where the output of a stage that ends with a layer has not the batch's rows first."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if uneven := [tuple(x.shape) for x in tensors if not x.dim() or len(x) != rows]:
        expected = f"tensors with the batch's {rows} rows first"
        raise BadInput("", f"the stage that ends with {type(layer).__name__}", f"{expected}, got one of {uneven[0]}")


def stage_tensors(output: Any, layer: nn.Module, rows: int) -> tuple[Tensor, ...]:
    """Check and return the tensors that a stage sends to the next."""
    tensors: tuple[Any, ...] = output if type(output) is tuple else (output,)
    if wrong := [type(x).__name__ for x in tensors if not isinstance(x, Tensor)]:
        expected = "expected a tensor or a tuple of tensors for the next stage"
        raise TypeError(f"the stage that ends with {type(layer).__name__}: {expected}, got {wrong[0]}")
    check_output(tensors, layer, rows)
    return tensors
