"""Training means and evaluation scores of several runs, logged under each run's name."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from lightning import LightningModule
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import Batch
from lit_modules.scores import ClassScores, MakeScores, Scores


class RunMetrics(LightningModule):
    """The part of a module that logs its runs, such as the students of a distillation.

    A run's values are logged as `<run>/<stage>/<what>`, or `<stage>/<what>` for the only run of a module.

    Attributes:
        failed: runs that have failed, with the step and the term.
        samples: seen in training.

    Args:
        runs: names of the runs; "" for a module that is one run.
        scores: makes the evaluation scores of a run.
    """

    def __init__(self, runs: Iterable[str], scores: MakeScores) -> None:
        super().__init__()
        self.runs = list(runs)
        # A list in the order of the runs: "" can't be the name of a submodule.
        self.scores = nn.ModuleList(scores() for _ in self.runs)
        self.train_sums: dict[str, float] = {}
        self.samples = 0
        self.failed: dict[str, dict[str, Any]] = {}

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """Logits (b, ..., classes) of each run that has not failed, for inputs (b, ...)."""
        raise NotImplementedError

    def scores_of(self, run: str) -> Scores:
        """The evaluation scores of a run."""
        return cast("Scores", self.scores[self.runs.index(run)])

    def log_training(self, values: Mapping[str, float], count: int) -> None:
        """Log the global batch's means (`<run>/<what>` to value), and add them to the epoch's sums."""
        self.samples += count
        for name, value in {**values, "rows": 1.0}.items():
            self.train_sums[name] = self.train_sums.get(name, 0.0) + value * count
        # Each logged value costs Lightning 0.2 ms, even if it does not write it.
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.global_step + 1) % every == 0:
            self.log_dict(_tags(values, "train"), batch_size=count)
            shown = {what: [v for k, v in values.items() if k.endswith(what)] for what in ("loss", "acc")}
            bar = {what: sum(found) / len(found) for what, found in shown.items() if found}
            self.log_dict(bar, prog_bar=True, logger=False, batch_size=count)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's means over samples, as the tutorials print them."""
        rows = self.train_sums.pop("rows", 0.0)
        if rows:
            self._log_epoch({f"{k}_epoch": v / rows for k, v in self.train_sums.items()}, "train")
        self.train_sums = {}

    def on_validation_epoch_start(self) -> None:
        """Reset the scores; not at the end, as a tensor made in another loop's inference mode can't be added to."""
        for scores in self.scores:
            scores.reset()  # type: ignore[operator]

    def on_test_epoch_start(self) -> None:
        """Reset the scores."""
        self.on_validation_epoch_start()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update the scores with a batch."""
        batch = Batch.of(batch, 0, shared=False)
        for run, logits in self.predict(batch.inputs).items():
            self.scores_of(run).update(logits, batch.labels)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log the validation scores."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log the test scores."""
        self._log_scores("test")

    def _log_scores(self, stage: str) -> None:
        for run in self.runs:
            if run in self.failed:
                continue
            scores = self.scores_of(run)
            values = scores.compute()
            if stage != "test":
                values.pop("correct", None)
            self._log_epoch({f"{run}/{k}" if run else k: v for k, v in values.items()}, stage)
            if stage == "test" and isinstance(scores, ClassScores):
                confusion = scores.confusion.compute().cpu()
                for logger in self.loggers:
                    if hasattr(logger, "log_confusion"):
                        names = getattr(self.trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
                        logger.log_confusion(run, confusion, names, self.global_step)

    def _log_epoch(self, values: Mapping[str, Any], stage: str) -> None:
        # All ranks have the same values: their maximum equals each bit for bit, where a mean would round.
        self.log_dict(_tags(values, stage), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)


def _tags(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """`kd/loss` -> `kd/train/loss`, `loss` -> `train/loss`."""
    return {"/".join([*name.split("/")[:-1], stage, name.split("/")[-1]]): value for name, value in values.items()}


def global_means(parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Means over the global batch of per-sample tensors (b,), summed in 64 bits and reduced in one message."""
    if not parts:
        return {}
    sums = replicas.all_reduce_sum(torch.stack([values.detach().double().sum() for values in parts.values()]))
    return dict(zip(parts, (sums / batch.count).tolist(), strict=True))
