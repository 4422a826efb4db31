"""Private names of torch, and of Lightning, that several layers use."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

TORCH = ">=2.11,<2.16"  # the versions that have them


def forget_logged(trainer: Any, names: Collection[str]) -> None:
    """Take back the values of steps that a module has logged by these names, which a Trainer would write again."""
    for key, metric in trainer._results.items() if names else ():
        if key.partition(".")[2] in names:
            metric.reset()


def scan_dimension(
    step: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]], state: Tensor, inputs: Sequence[Tensor], dim: int
) -> tuple[Tensor, Tensor]:
    """Go through slices of inputs along a dimension, in one graph for any number; return stacked outputs and the state.

    `step` makes an output and the next state of the state and slices.
    """

    def combine(before: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        output, after = step(before, slices)
        return after, output.clone()  # torch's operator takes no output that is its input

    result: Any = scan(combine, state, tuple(inputs), dim=dim)
    last, outputs = result
    return outputs, last
