"""The scores of a loop's runs in validation and test, and values of single test samples."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from apprentice.batch import Batch
from lit_modules.tasks.base import EMA, Task
from lit_modules.tasks.scores import TEST, VALIDATION, PerSample, Scored, Scores, fidelity
from lit_modules.training.training_log import tags
from lit_modules.training.whole_outputs import Predictions

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop

PART_OF = {"val": VALIDATION, "test": TEST}  # the part of the data that a stage scores


def evaluated_part(trainer: Trainer | None) -> str:
    """Return the part of the data that an evaluation scores."""
    return TEST if trainer is not None and trainer.testing else VALIDATION


class RunScores(nn.Module):
    """Scores of each run, of the averages of weights that some have, and what a test keeps of single samples.

    Args:
        runs: their names.
        task: what they are scored by.
        beside_teacher: whether a test compares them with a teacher.
    """

    def __init__(self, runs: Iterable[str], task: Task, beside_teacher: bool) -> None:
        super().__init__()
        self.runs = list(runs)
        # Lists in the order of the runs: "" can't be the name of a submodule.
        self.scores = nn.ModuleList(task.scores() for _ in self.runs)
        self.averaged = nn.ModuleDict()  # by run, of averages of its weights
        self.beside = beside = task.fidelity if beside_teacher else ()
        self.tested = nn.ModuleList(PerSample((*self.of(run).sampled, *beside)) for run in self.runs)

    def of(self, run: str) -> Scores:
        """Return the evaluation scores of a run."""
        return cast("Scores", self.scores[self.runs.index(run)])

    def _samples(self) -> list[PerSample]:
        return cast("list[PerSample]", [*self.tested])

    def reset(self, stage: str) -> None:
        """Begin a stage; not at the end, as a tensor made in another loop's inference mode can't be added to."""
        for scores in (*self.scores, *self.averaged.values()):
            cast("Scores", scores).reset()
        for tested in self._samples() if stage == "test" else ():
            tested.reset()

    def score(self, loop: "Loop", batch: Batch, beside: bool) -> Predictions[Scored]:
        """Add a batch to the scores of all runs, also beside a teacher; return what they are made of."""
        with loop.reader.naming_inputs(batch.inputs):
            predictions = loop.evaluate(batch, beside)
        for outputs in predictions.students.values():
            loop.reader.check_labels(outputs.logits, batch, loop.training)
        scored = loop.outputs.measure(predictions, batch.labels)
        for run, values in scored.students.items():
            _update(self.of(run), values, batch)
        for run, values in scored.averaged.items():
            _update(cast("Scores", self.averaged[run]), values, batch)
        return scored

    def add_samples(self, batch: Batch, predictions: Predictions[Scored]) -> None:
        """Keep the values of a batch's samples, also beside the teacher."""
        teacher = predictions.teacher if isinstance(predictions.teacher, Tensor) else None
        for run, scored in predictions.students.items():
            beside = fidelity(scored, teacher, batch.labels) if self.beside else {}
            values = self.of(run).of_sample(scored, batch.labels) | beside
            self._samples()[self.runs.index(run)].update(batch.index, values)

    def of_samples(self, failed: Mapping[str, object]) -> dict[str, dict[str, Tensor]]:
        """Gather the values (n,) of the last test's samples from all ranks, by run and by name, in the samples' order.

        They are those of `Scores.of_sample` and `of_all_samples`, of `fidelity` beside a teacher, and `place`. A run
        that has failed is left out; one has no values if the loader does not number samples.
        """
        return {
            run: {name: x.cpu() for name, x in (tested.compute() | self.of(run).of_all_samples()).items()}
            for run, tested in zip(self.runs, self._samples(), strict=True)
            if run not in failed
        }

    def names(self) -> list[str]:
        """Return the names that a validation logs."""
        scores = {run: dict.fromkeys(("loss", *self.of(run).names)) for run in self.runs}
        names = [f"{run}/{what}".lstrip("/") for run, of_run in scores.items() for what in of_run if what != "correct"]
        names += [f"{run}/{EMA}{what}" for run in self.averaged for what in scores[run] if what != "correct"]
        return [*tags(dict.fromkeys(names), "val")]

    def log(self, loop: "Loop", stage: str) -> None:
        """Log the scores of the runs that are active, and what a test confuses."""
        for run in loop.active_runs:
            values = {f"{run}/{k}" if run else k: v for k, v in self._compute(run, stage).items()}
            loop.training_log.log_epoch(loop, values, stage)
            trainer = loop.trainer
            if stage == "val" and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
                loop.training_log.validated |= tags({name: float(value) for name, value in values.items()}, stage)
            if stage == "test" and (confusion := self.of(run).confusion_matrix()) is not None:
                for logger in loop.loggers:
                    if hasattr(logger, "log_confusion"):
                        names = getattr(getattr(trainer, "datamodule", None), "class_names", None)
                        logger.log_confusion(run, confusion, names, loop.global_step)

    def _compute(self, run: str, stage: str) -> dict[str, Any]:
        scores = self.of(run)
        scores.part = PART_OF[stage]
        values = scores.compute()
        if stage != "test":
            values.pop("correct", None)
        if run in self.averaged:
            averaged = cast("Scores", self.averaged[run])
            averaged.part = PART_OF[stage]
            values |= {f"{EMA}{name}": value for name, value in averaged.compute().items() if name != "correct"}
        return values


def _update(scores: Scores, values: Scored, batch: Batch) -> None:
    scores.index = batch.index
    scores.update(values, batch.labels)
