"""What a loop logs of its training: means of steps and epochs, and what a checkpoint in mid-epoch needs."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apprentice import replicas
from apprentice.batch import Batch
from apprentice.private import forget_logged
from lit_modules.tasks.base import COUNTS, BatchSize

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop

BAR = ("loss", "acc")  # means over runs, for a progress bar


class TrainingLog:
    """Means of training values. A run's are logged as `<run>/train/<what>`, or `train/<what>` for the only run.

    Attributes:
        samples: seen in training.
        epochs: of each the means in training, and the scores of its validation.
        validated: scores of validation in this epoch.
        labelled_only: names of values, `<run>/<what>`, that are means over the labelled rows alone.
    """

    saved = ("train_sums", "samples", "epochs", "validated")

    def __init__(self) -> None:
        # Of values in this epoch: their sums, weighted by what they are means over, and the sums of these weights.
        self.train_sums: dict[str, tuple[float, float]] = {}
        self.samples = 0
        self.epochs: list[dict[str, float]] = []
        self.validated: dict[str, float] = {}
        self.labelled_only: set[str] = set()
        self._last_logged: dict[str, Collection[str]] = {}  # names of the last logged step, by what logs them

    def add(self, loop: "Loop", values: Mapping[str, float], size: BatchSize, elsewhere: Mapping[str, int]) -> None:
        """Log the global batch's means (`<run>/<what>` to value), and add them to the epoch's sums.

        `elsewhere` has runs that have learned from other batches, and how many values their means are of. Means over
        nothing are left out.
        """
        self.samples += size.samples
        weights = {}
        for name in values:
            weight = elsewhere.get(name.rpartition("/")[0], size.values)
            weights[name] = weight * (size.labelled if name in self.labelled_only else 1.0)
        values = {name: value for name, value in values.items() if weights[name]}
        for name, value in values.items():
            total, weight = self.train_sums.get(name, (0.0, 0.0))
            self.train_sums[name] = total + value * weights[name], weight + weights[name]
        if is_logged(loop, loop.global_step + 1):
            self.log_step(loop, "values", tags(values, "train"), size.rows)
            of_runs = {what: [v for k, v in values.items() if k.endswith(what)] for what in BAR}
            bar = {what: sum(means) / len(means) for what, means in of_runs.items() if means}
            loop.log_dict(bar, prog_bar=True, logger=False, batch_size=size.rows)

    def log_step(self, loop: "Loop", source: str, values: Mapping[str, Any], rows: int = 1) -> None:
        """Log values of a step, and none of the names that the last call of this `source` had beside these.

        Lightning would repeat these in each step to the end of the epoch, but not in a run that is resumed.
        """
        forget_logged(loop.trainer, {*self._last_logged.get(source, ())} - values.keys())
        self._last_logged[source] = {*values}
        loop.log_dict(values, batch_size=rows)

    def end_epoch(self, loop: "Loop") -> None:
        """Log the epoch's means over samples, as the tutorials print them."""
        if self.train_sums:
            means = self.epoch_means()
            self.log_epoch(loop, {f"{name}_epoch": mean for name, mean in means.items()}, "train")
            self.epochs.append({**tags(means, "train"), **self.validated})
        self.train_sums, self.validated = {}, {}

    def epoch_means(self) -> dict[str, float]:
        """Return the means of training values in the epoch so far, each over the rows, tokens or labels that it is of.

        Losses of a run that are not `labelled_only` are the batches', in which its labelled terms have their full
        weight.
        """
        return {name: total / weight for name, (total, weight) in self.train_sums.items()}

    def drop(self, run: str) -> None:
        """Leave a run out of the epoch's means, which are over rows that it has not seen; a module's only run stays."""
        self.train_sums = {name: v for name, v in self.train_sums.items() if name.rpartition("/")[0] != run or not run}

    @staticmethod
    def log_epoch(loop: "Loop", values: Mapping[str, Any], stage: str) -> None:
        """Log values of an epoch, which all ranks have: their maximum equals each, where a mean would round."""
        loop.log_dict(tags(values, stage), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)


def is_logged(loop: "Loop", steps: int) -> bool:
    """Return whether values are logged after so many steps: each costs Lightning 0.2 ms, even unwritten."""
    every: int = getattr(loop.trainer, "log_every_n_steps", 0)
    return bool(every) and steps % every == 0


def logged_names(validation: list[str], values: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that a fit logs in `validation`, at the end of an `epoch` and in a `step`.

    `values` are the names of a batch's values, `<run>/<what>`.
    """
    trained = dict.fromkeys(name for name in values if name not in COUNTS)
    bar = [what for what in BAR if any(name.endswith(what) for name in trained)]
    return {
        "validation": validation,
        "epoch": [*tags({f"{name}_epoch": None for name in trained}, "train")],
        "step": [*tags(trained, "train"), *bar],
    }


def tags(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """`kd/loss` -> `kd/train/loss`, `loss` -> `train/loss`."""
    return {"/".join([*name.split("/")[:-1], stage, name.split("/")[-1]]): value for name, value in values.items()}


def global_means(parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Return means over the global batch of values (b,), summed in 64 bits and reduced in one message."""
    if not parts:
        return {}
    sums = replicas.all_reduce_sum(torch.stack([values.detach().double().sum() for values in parts.values()]))
    return dict(zip(parts, (sums / batch.count).tolist(), strict=True))


def not_finite(means: Mapping[str, float], runs: Iterable[str]) -> dict[str, str]:
    """Return by run, in this order, the first of its values that is not finite, of means by `<run>/<what>`."""
    bad = dict[str, str]()
    for name, value in means.items():
        run, _, what = name.rpartition("/")
        if not math.isfinite(value):
            bad.setdefault(run, what)
    return {run: bad[run] for run in runs if run in bad}
