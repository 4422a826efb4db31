"""What a fit leaves of a net: its scores, floating-point operations of its training, the time of a step alone."""

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from apprentice import replicas
from apprentice.batch import Batch
from datamodules import InMemoryData
from harness.reports import samples
from harness.runs.plans import Arm, Fit
from harness.runs.records import Failure, NetRecord
from lit_modules.learner import Learner
from lit_modules.tasks.base import EMA
from strategies.base.private import TorchDispatchMode

LONGEST = 0.25  # seconds in which steps are timed, beyond the first three
SLOW = 2.0  # seconds of a step of which one is enough
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


def flops(step: Callable[[], Tensor]) -> int | None:
    """Count operations of forward, loss and backward of a step, which returns the loss, without compiling.

    None if the step runs an operator without a formula, such as a custom one: a count without it would mislead.
    """
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    uncounted = _Uncounted(counter.flop_registry)
    with torch.compiler.set_stance("force_eager"), uncounted, counter:
        step().backward()
    return None if uncounted.has_run else counter.get_total_flops()


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Let this rank compute by itself: it waits for no other, and states of random numbers stay as they were."""
    with replicas.shard(0), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def milliseconds(step: Callable[[], Tensor]) -> float:
    """Measure the median time of a step with its backward, after one warm-up step; the step clears gradients itself.

    Of ten steps, or of as many as LONGEST seconds allow, but at least of three, unless one takes more than SLOW.
    """
    moments: list[float] = []
    while len(moments) < 4 or (len(moments) < 11 and moments[-1] - moments[0] < LONGEST):
        if len(moments) > 1 and moments[-1] - moments[-2] > SLOW:
            break
        loss = step()
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
    return median(stop - start for start, stop in pairwise(moments)) * 1e3


def measure(module: Learner, arm: Arm, run: str, outcome: Fit, data: InMemoryData) -> NetRecord:
    """Measure an arm, a run of its module: its scores in the test, and what a step of its training costs."""
    prefix, failed = f"{run}/test" if run else "test", module.failed.get(run)
    ended = module.stopped.get(run, {"epochs": outcome.epochs, "steps": None, "samples": module.samples})
    scores = {} if failed else outcome.scores
    figures: dict[str, float | None] = {
        "parameters": sum(p.numel() for p in module.net_of(run).parameters()),
        **{f"test_{name}": scores.get(f"{prefix}/{name}") for name in module.scores_of(run).names},
        **averaged_scores(module, run, scores, prefix),
        "step_ms": None,
        "train_flops": None,
    }
    if (correct := figures.get("test_correct")) is not None:
        figures["test_correct"] = round(correct)
    of_samples, values = samples.summarize(module.task, outcome.samples.get(run, {}), data.test_units)
    if module.samples and scores:  # a loaded net has no training to measure
        weight, count = next(module.parameters()), min(data.batch_size, data.sizes["train"])
        inputs, labels = data.samples("train", torch.arange(count), weight.dtype)
        pair = inputs.to(weight.device), labels.to(weight.device)
        with outcome.autocast(), alone(weight.device):
            phases = module.steps_alone(run, Batch.of(pair, 0, shared=False))
            operations = [flops(step) for _, step in phases]
            if None not in operations:
                mean = sum(share * (count or 0) for (share, _), count in zip(phases, operations, strict=True))
                figures["train_flops"] = round(mean / len(labels) * ended["samples"])
            figures["step_ms"] = sum(share * milliseconds(step) for share, step in phases)
    return NetRecord(
        arm.method.name, {**figures, **of_samples}, Failure(**failed) if failed else None, ended["epochs"],
        list_epochs(module, run), samples=values, trained_steps=ended["steps"], best_epoch=outcome.best_epochs.get(run),
    )  # fmt: skip


def averaged_scores(module: Learner, run: str, scores: Mapping[str, float], prefix: str) -> dict[str, float | None]:
    """Return the test scores of the average of a run's weights, by their keys in a record, if it has one."""
    names = [name for name in module.scores_of(run).names if name != "correct" and run in module.averaged_scores]
    return {f"test_{EMA}{name}": scores.get(f"{prefix}/{EMA}{name}") for name in names}


def list_epochs(module: Learner, run: str) -> list[dict[str, float | None]]:
    """Return a run's values of each epoch by their names in the log without the run's: `train/loss`, `val/acc`.

    None stands for what is infinite, such as a perplexity.
    """
    prefix = f"{run}/" if run else ""
    epochs = []
    for epoch in module.epochs:
        values = {name.removeprefix(prefix): x for name, x in epoch.items() if name.startswith(prefix)}
        epochs.append({name: x if math.isfinite(x) else None for name, x in values.items()})
    return [values for values in epochs if values]
