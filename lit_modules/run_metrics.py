"""The logging of a module's runs: means of training, scores of validation and test, values of test samples."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import Batch
from lit_modules.labels import ChecksBatches, require_batch
from lit_modules.nets.recorded import Recorded
from lit_modules.tasks.base import EMA, FIDELITY, LABELLED, TEXTS, TOKENS, Task
from lit_modules.tasks.scores import PerSample, Scores, TokenValues, fidelity
from lit_modules.token_scores import Measured, Predictions

BAR = ("loss", "acc")  # means over runs, for a progress bar


class RunMetrics(Recorded, ChecksBatches):
    """The part of a module that logs its runs, such as the students of a distillation.

    A run's values are logged as `<run>/<stage>/<what>`, or `<stage>/<what>` for the only run of a module.

    Attributes:
        failed: runs that have failed, with the step and the term.
        stopped: runs that have stopped before the others, with the epochs, steps and samples that they have trained.
        samples: seen in training.
        of_labels: names of training values, as in `log_training`, that are means over the labelled rows alone.
        has_teacher: whether `predict_beside_teacher` gives a teacher's logits.
        score_chunk: of texts, tokens whose logits evaluation holds at once; 0 for all of a batch.
    """

    has_teacher = False
    score_chunk = 0

    def __init__(self, runs: Iterable[str], task: Task) -> None:
        super().__init__(task)
        self.save_hyperparameters(self.init_args)
        self.runs = list(runs)
        # A list in the order of the runs: "" can't be the name of a submodule.
        self.scores = nn.ModuleList(task.scores() for _ in self.runs)
        self.averaged_scores = nn.ModuleDict()  # by run, of averages of its weights
        beside = FIDELITY if self.has_teacher else ()
        self.tested = nn.ModuleList(PerSample((*self.scores_of(run).sampled, *beside)) for run in self.runs)
        self.train_sums: dict[str, float] = {}
        self.samples = 0
        self.epochs: list[dict[str, float]] = []  # of each the means in training, and the scores of its validation
        self.validated: dict[str, float] = {}  # in this epoch
        self.failed: dict[str, dict[str, Any]] = {}
        self.stopped: dict[str, dict[str, Any]] = {}
        self.of_labels: set[str] = set()

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """Logits (b, ..., classes) of each run that is active, for inputs (b, ...)."""
        raise NotImplementedError

    def predict_beside_teacher(self, inputs: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The teacher's logits, if the module has one, and those of `predict`."""
        return None, self.predict(inputs)

    @property
    def inactive(self) -> set[str]:
        """Runs that are not computed: those that failed and, during a fit, those that have stopped."""
        trainer = self.attached_trainer
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        return {*self.failed, *(self.stopped if fits else ())}

    @property
    def active_runs(self) -> list[str]:
        return [run for run in self.runs if run not in self.inactive]

    def peers_of(self, run: str) -> list[str]:
        """Other runs that a run learns from."""
        return []

    def names_of(self, run: str, names: Iterable[str]) -> list[str]:
        """Those of the names in the module's state that are of a run."""
        return list(names)

    def predict_averaged(self, inputs: Tensor) -> dict[str, Tensor]:
        """Logits of the active runs that have averages of their weights, by these."""
        return {}

    def evaluate(self, inputs: Tensor, beside: bool) -> Predictions:
        """What evaluation scores: the logits of `predict` and, if `beside`, the teacher's.

        A module may leave out those of texts, and give what `score_chunk` tokens at a time are computed from.
        """
        teacher, predicted = self.predict_beside_teacher(inputs) if beside else (None, self.predict(inputs))
        return Predictions(teacher, predicted, self.predict_averaged(inputs))

    def scores_of(self, run: str) -> Scores:
        """The evaluation scores of a run."""
        return cast("Scores", self.scores[self.runs.index(run)])

    def logged_names(self, values: Iterable[str]) -> dict[str, list[str]]:
        """Return the names that a fit logs in `validation`, at the end of an `epoch` and in a `step`.

        `values` are the names of a batch's values, `<run>/<what>`, as in `log_training`.
        """
        trained = dict.fromkeys(name for name in values if name not in {LABELLED, TOKENS, TEXTS})
        scores = {run: dict.fromkeys(("loss", *self.scores_of(run).names)) for run in self.runs}
        validated = [
            f"{run}/{what}".lstrip("/") for run, names in scores.items() for what in names if what != "correct"
        ]
        validated += [f"{run}/{EMA}{what}" for run in self.averaged_scores for what in scores[run] if what != "correct"]
        bar = [what for what in BAR if any(name.endswith(what) for name in trained)]
        return {
            "validation": [*tags(dict.fromkeys(validated), "val")],
            "epoch": [*tags({f"{name}_epoch": None for name in trained}, "train")],
            "step": [*tags(trained, "train"), *bar],
        }

    def log_training(self, values: Mapping[str, float], count: int, counts: Mapping[str, float]) -> None:
        """Log the global batch's means (`<run>/<what>` to value), and add them to the epoch's sums.

        `counts` has the fraction LABELLED of its `count` rows, if some labels are hidden, and of texts the mean number
        of TOKENS of a row, and of TEXTS if a row has several. Means over no label, or no token, are left out.
        """
        self.samples += round(count * counts.get(TEXTS, 1.0))
        labelled, rows = counts.get(LABELLED), count * counts.get(TOKENS, 1.0)
        if labelled == 0:
            values = {name: value for name, value in values.items() if name not in self.of_labels}
        if not rows:
            return
        shares = {"rows": 1.0} if labelled is None else {"rows": 1.0, LABELLED: labelled}
        for name, value in {**values, **shares}.items():
            weight = rows if labelled is None or name not in self.of_labels else rows * labelled
            self.train_sums[name] = self.train_sums.get(name, 0.0) + value * weight
        if self.is_logged(self.global_step + 1):
            self.log_dict(tags(values, "train"), batch_size=count)
            of_runs = {what: [v for k, v in values.items() if k.endswith(what)] for what in BAR}
            bar = {what: sum(means) / len(means) for what, means in of_runs.items() if means}
            self.log_dict(bar, prog_bar=True, logger=False, batch_size=count)

    def is_logged(self, steps: int) -> bool:
        """Whether values are logged after so many steps: each costs Lightning 0.2 ms, even if it does not write it."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(every) and steps % every == 0

    def on_train_epoch_end(self) -> None:
        """Log the epoch's means over samples, as the tutorials print them."""
        if self.train_sums:
            means = self.epoch_means()
            self._log_epoch({f"{name}_epoch": mean for name, mean in means.items()}, "train")
            self.epochs.append({**tags(means, "train"), **self.validated})
        self.train_sums, self.validated = {}, {}

    def epoch_means(self) -> dict[str, float]:
        """The means of training values in the epoch so far, over its rows or tokens; `of_labels`, over labelled ones.

        Losses of a run that are not `of_labels` are the batches', in which its labelled terms have their full weight.
        """
        rows = self.train_sums.get("rows", 0.0)
        labelled = self.train_sums.get(LABELLED, rows)
        return {
            name: total / (labelled if name in self.of_labels else rows)
            for name, total in self.train_sums.items()
            if name not in {"rows", LABELLED}
        }

    def on_validation_epoch_start(self) -> None:
        """Reset the scores; not at the end, as a tensor made in another loop's inference mode can't be added to."""
        for scores in (*self.scores, *self.averaged_scores.values()):
            cast("Scores", scores).reset()

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()
        for tested in self.tested:
            tested.reset()  # type: ignore[operator]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._add_scores(Batch.of(require_batch(batch), 0, shared=False), beside=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        batch = Batch.of(require_batch(batch), 0, shared=False)
        measured = self._add_scores(batch, beside=True)
        for run, logits in measured.students.items():
            values = self.scores_of(run).of_sample(logits, batch.labels)
            values |= fidelity(logits, measured.teacher, batch.labels)
            cast("PerSample", self.tested[self.runs.index(run)]).update(batch.index, values)

    def _add_scores(self, batch: Batch, beside: bool) -> Measured:
        """Add a batch to the scores of all runs; return what they are made of."""
        with self.naming_inputs(batch.inputs):
            predictions = self.evaluate(batch.inputs, beside)
        for logits in predictions.students.values():
            self.check_labels(logits, batch)
        measured = predictions.measure_tokens(batch.labels, self.score_chunk)
        for run, values in measured.students.items():
            _update(self.scores_of(run), values, batch)
        for run, values in measured.averaged.items():
            _update(cast("Scores", self.averaged_scores[run]), values, batch)
        return measured

    def of_samples(self) -> dict[str, dict[str, Tensor]]:
        """Gather the values (n,) of the last test's samples from all ranks, by run and by name, in the samples' order.

        They are those of `Scores.of_sample`, of `fidelity` beside a teacher, and `place`. A run that has failed is left
        out; one has no values if the loader does not number samples.
        """
        return {
            run: {name: values.cpu() for name, values in tested.compute().items()}  # type: ignore[operator]
            for run, tested in zip(self.runs, self.tested, strict=True)
            if run not in self.failed
        }

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Tensor | dict[str, Tensor]:
        """Logits (b, ..., classes) of a batch, of inputs alone too; of several runs by their names."""
        inputs = batch.inputs if isinstance(batch, Batch) else batch[0] if isinstance(batch, list | tuple) else batch
        logits = self.predict(inputs)
        return logits.get("", logits)

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    def _log_scores(self, stage: str) -> None:
        for run in self.runs:
            if run in self.inactive:
                continue
            scores = self.scores_of(run)
            values = scores.compute()
            if stage != "test":
                values.pop("correct", None)
            if run in self.averaged_scores:
                averaged = cast("Scores", self.averaged_scores[run]).compute()
                values |= {f"{EMA}{name}": value for name, value in averaged.items() if name != "correct"}
            values = {f"{run}/{k}" if run else k: v for k, v in values.items()}
            self._log_epoch(values, stage)
            if stage == "val" and self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
                self.validated |= tags({name: float(value) for name, value in values.items()}, stage)
            if stage == "test" and (confusion := scores.confusion_matrix()) is not None:
                for logger in self.loggers:
                    if hasattr(logger, "log_confusion"):
                        names = getattr(self.trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
                        logger.log_confusion(run, confusion, names, self.global_step)

    def _log_epoch(self, values: Mapping[str, Any], stage: str) -> None:
        # All ranks have the same values: their maximum equals each bit for bit, where a mean would round.
        self.log_dict(tags(values, stage), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)


def _update(scores: Scores, logits: Tensor | TokenValues, batch: Batch) -> None:
    scores.index = batch.index
    scores.update(logits, batch.labels)


def tags(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """`kd/loss` -> `kd/train/loss`, `loss` -> `train/loss`."""
    return {"/".join([*name.split("/")[:-1], stage, name.split("/")[-1]]): value for name, value in values.items()}


def global_means(parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Means over the global batch of per-sample tensors (b,), summed in 64 bits and reduced in one message."""
    if not parts:
        return {}
    sums = replicas.all_reduce_sum(torch.stack([values.detach().double().sum() for values in parts.values()]))
    return dict(zip(parts, (sums / batch.count).tolist(), strict=True))
