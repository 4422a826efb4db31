"""What a fit leaves of a net: its scores, floating-point operations of its training, the time of a step alone."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from apprentice import replicas
from apprentice.batch import Batch
from datamodules.base import InMemoryData
from harness.reports import samples
from harness.runs.plans import Arm, FitOutcome
from harness.runs.records import Failure, NetRecord
from harness.studies.training_flops import LearnedBatches, count_training
from lit_modules.tasks.base import EMA
from lit_modules.training.loop import Loop

LONGEST = 0.25  # seconds in which steps are timed, beyond the first three
SLOW = 2.0  # seconds of a step of which one is enough
CountTraining = Callable[[Loop, str, Batch, LearnedBatches], int | None]  # as `count_training`


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device."""
    moved = {name: x.to(device) for name, x in batch._asdict().items() if isinstance(x, Tensor)}
    return batch._replace(**cast("Any", moved))


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


def measure(
    module: Loop, arm: Arm, run: str, outcome: FitOutcome, data: InMemoryData, count: CountTraining = count_training
) -> NetRecord:
    """Measure an arm, a run of its module: its scores in the test, and what a step of its training costs."""
    prefix, failed = f"{run}/test" if run else "test", module.failed.get(run)
    ended = module.stopped.get(run, {"epochs": outcome.epochs, "samples": module.training_log.samples})
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
    if ended["samples"] and scores:  # a loaded net, or one that is not trained, has no training to measure
        weight = next(module.parameters())
        batch = on_device(data.typical_batch(weight.dtype).batch, weight.device)
        trained = LearnedBatches.of(data, ended["samples"])
        with outcome.autocast(), alone(weight.device):
            figures["train_flops"] = count(module, run, batch, trained)
            shares = trained.shares(module.timed_steps(run, batch), module.batches_planned)
            figures["step_ms"] = sum(share * milliseconds(step) for step, share in shares)
    return NetRecord(
        arm.method.name, {**figures, **of_samples}, Failure(**failed) if failed else None, ended["epochs"],
        list_epochs(module, run), samples=values, best_epoch=outcome.best_epochs.get(run),
    )  # fmt: skip


def averaged_scores(module: Loop, run: str, scores: Mapping[str, float], prefix: str) -> dict[str, float | None]:
    """Return the test scores of the average of a run's weights, by their keys in a record, if it has one."""
    names = [name for name in module.scores_of(run).names if name != "correct" and run in module.run_scores.averaged]
    return {f"test_{EMA}{name}": scores.get(f"{prefix}/{EMA}{name}") for name in names}


def list_epochs(module: Loop, run: str) -> list[dict[str, float | None]]:
    """Return a run's values of each epoch by their names in the log without the run's: `train/loss`, `val/acc`.

    None stands for what is infinite, such as a perplexity.
    """
    prefix = f"{run}/" if run else ""
    epochs = []
    for epoch in module.training_log.epochs:
        values = {name.removeprefix(prefix): x for name, x in epoch.items() if name.startswith(prefix)}
        epochs.append({name: x if math.isfinite(x) else None for name, x in values.items()})
    return [values for values in epochs if values]
