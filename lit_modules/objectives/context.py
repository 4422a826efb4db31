"""What a training step tells an objective beside outputs and labels."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from lit_modules.nets.outputs import Outputs


@dataclass(frozen=True)
class StepContext:
    """The point in training at which an objective is called, and the rows that it gets."""

    step: int = 0  # batches that training has completed
    epoch: float = 0.0  # the same in epochs, with fractions
    progress: float = 0.0  # the same as a fraction of the whole training, which a run that grows by epochs changes
    index: Tensor | None = None  # (b,) int64, the samples' places in their set
    rows: Tensor | None = None  # (b,) int64, the samples' rows in the global batch
    count: int = 0  # rows in the global batch
    samples: int | None = None  # in the training set, if `index` is known; also in `build`
    peers: Mapping[str, Outputs] = field(default_factory=dict)  # outputs of `peers`, without gradients
    counted: Tensor | None = None  # (b, T) bool, which tokens count; None if all do
    has_labels: bool = True  # whether the task has labels; without, terms of cross-entropies are left out
    # The loss (b,) of labels that are no classes, given outputs and labels; None where cross-entropies are it.
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    labels: Tensor | None = None  # (b, C), those of which `loss` is; 0 stands for each in the labels of `forward`
    is_written: bool = False  # whether the texts are the student's own: their labels teach nothing


NO_STEP = StepContext()  # outside of training


def call(method: Callable[..., Any], *arguments: Any, context: StepContext) -> Any:
    """Call a method of an objective, with the context if it takes one."""
    if takes_context(method):
        return method(*arguments, context)
    return method(*arguments)


def takes_context(method: Callable[..., Any]) -> bool:
    """Return whether a method has an argument `context`."""
    return _takes_context(getattr(method, "__func__", method))


@cache
def _takes_context(function: Callable[..., Any]) -> bool:
    return "context" in inspect.signature(function).parameters
