"""Floating-point operations of what torch computes, by the shapes of its operators' arguments."""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from strategies.base.private import TorchDispatchMode

Shape = Sequence[int]
aten = torch.ops.aten


def _conv_backward(grad: Shape, x: Shape, w: Shape, *rest: Any, **_: Any) -> int:
    """Count forward's for each gradient that is computed; torch's formula ignores groups for that of weights."""
    transposed, output_mask = rest[4], rest[7]
    return sum(output_mask[:2]) * conv_flop_count(list(x), list(w), list(grad), transposed)


def _recurrent(x: Shape, weights: Iterable[Shape]) -> int:
    """Count for x (..., features): each matrix multiplies each row of x or the states once; backward is twice that."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2)


FORMULAS: dict[Any, Any] = {  # of the shapes of an operator's arguments
    aten.convolution_backward: _conv_backward,
    aten.mv: lambda a, _v, **_: 2 * math.prod(a),
    aten.mkldnn_rnn_layer: lambda x, w, u, *_, **__: _recurrent(x, (w, u)),
    aten.mkldnn_rnn_layer_backward: lambda x, w, u, *_, **__: 2 * _recurrent(x, (w, u)),
    aten._cudnn_rnn: lambda x, weights, *_, **__: _recurrent(x, weights),
    aten._cudnn_rnn_backward: lambda x, weights, *_, **__: 2 * _recurrent(x, weights),
    # unknown to the counter of torch 2.11
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
ELEMENTWISE = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional"}  # namespaces, but for these words:
PRODUCTS = {
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "matmul", "linear", "trilinear", "cdist", "euclidean",
    "conv", "conv2d", "conv3d", "convolution", "rnn", "lstm", "gru", "attention", "encoder",
}  # fmt: skip


class _Uncounted(TorchDispatchMode):
    """Finds out whether an operator ran that may multiply matrices and is not `known` to have a formula."""

    supports_higher_order_operators = True

    def __init__(self, formulas: Container[Any]) -> None:
        super().__init__()
        self.formulas, self.has_run = formulas, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = set(func.__name__.partition(".")[0].strip("_").split("_"))
        multiplies = func.namespace not in ELEMENTWISE or (words & PRODUCTS and "cell" not in words)
        if multiplies and getattr(func, "_overloadpacket", func) not in self.formulas:
            self.has_run = True
        return func(*args, **kwargs or {})


def count_operations(compute: Callable[[], object]) -> int | None:
    """Count floating-point operations of what is computed, without compiling.

    None if an operator without a formula runs, such as a custom one: a count without it would mislead.
    """
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    uncounted = _Uncounted(counter.flop_registry)
    with torch.compiler.set_stance("force_eager"), uncounted, counter:
        compute()
    return None if uncounted.has_run else counter.get_total_flops()


def flops(step: Callable[[], Tensor]) -> int | None:
    """Count operations of forward, loss and backward of a step, which returns the loss; None as `count_operations`."""
    return count_operations(lambda: step().backward())
