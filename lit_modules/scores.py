"""Evaluation scores, which count each sample once on any number of ranks, and the logging of runs with them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.utilities.data import dim_zero_cat

from apprentice import replicas
from apprentice.batch import Batch, label_mask
from apprentice.errors import BadInput
from lit_modules.labels import ChecksBatches, checked
from lit_modules.nets.recorded import Recorded
from lit_modules.objectives.base import widen
from lit_modules.objectives.cross_entropy import cross_entropy

UNIT = 2.0**32
ACCURACY = "acc"
BAR = ("loss", ACCURACY)  # means over runs, for a progress bar
TOP = 5
ClassMetric = Literal["accuracy", "balanced_accuracy", "top5", "f1"]
LABELLED = "labelled"  # name of 1 for each row with a label, else 0; given if some labels are hidden
TOKENS = "tokens"  # name of the tokens that count in each row, of texts


class ExactMean(Metric):
    """Mean of per-sample values, summed in integers: whole parts, and fractions in units of 2**-32.

    Each value is rounded to 2e-10; a value that is not finite or above 2**53 makes the mean NaN.
    """

    whole: Tensor
    fraction: Tensor
    samples: Tensor
    broken: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("whole", "fraction", "samples", "broken"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add b samples: values (b,)."""
        values = values.detach().double()
        usable = values.abs() <= 2.0**53
        values = values.where(usable, 0.0)
        floor = values.floor()
        self.whole += floor.long().sum()
        self.fraction += ((values - floor) * UNIT).round().long().sum()
        self.samples += len(values)
        self.broken += (~usable).sum()

    def compute(self) -> Tensor:
        """The mean, a float64 scalar."""
        mean = (self.whole.double() + self.fraction.double() / UNIT) / self.samples
        return mean.where(self.broken == 0, torch.nan)


class PerSample(Metric):
    """Values of single samples by name, in the order of their places in the data set."""

    index: list[Tensor]
    value: list[Tensor]

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in ("index", "value"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.reset()

    def reset(self) -> None:
        """Start with none; a rank may get no sample, and others wait for what it has."""
        super().reset()
        self.index = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        self.value = [torch.zeros(0, len(self.names), dtype=torch.float64, device=self.device)]

    def update(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add b samples: their places (b,) and, for each name, values (b,)."""
        self.index.append(index)
        self.value.append(torch.stack([values[name].detach().double() for name in self.names], 1))

    def compute(self) -> dict[str, Tensor]:
        """The values (n,) float64 of all ranks, and `place`; nothing where a loader numbers no samples.

        Then a place has several of them.
        """
        index, values = dim_zero_cat(self.index), dim_zero_cat(self.value)
        places, order = index.sort()
        if len(places.unique()) < len(places):
            return {}
        return {"place": places, **dict(zip(self.names, values[order].unbind(1), strict=True))}


FIDELITY = ("kl", "agreement")


def fidelity(logits: Tensor, teacher: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """How a net follows its teacher, (b,) each: KL(teacher || net) in nats, and whether both predict the same class.

    Logits (b, ..., classes). Of texts they are means over the tokens that have a label. (Stanton et al., "Does
    Knowledge Distillation Really Work?", 2021.)
    """
    own, other = (F.log_softmax(widen(x), -1) for x in (logits, teacher))
    found = {"kl": F.kl_div(own, other, reduction="none", log_target=True).sum(-1)}
    found["agreement"] = (logits.argmax(-1) == teacher.argmax(-1)).to(found["kl"].dtype)
    if labels.ndim == 1:
        return found
    known = label_mask(labels)
    return {name: x.where(known, 0.0).sum(1) / known.sum(1).clamp(min=1) for name, x in found.items()}


class Scores(nn.Module):
    """The scores of one run."""

    names: tuple[str, ...]  # of the values in a test's result, the most important first
    sampled: tuple[str, ...] = ()  # of the values of a single sample in a test

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add b samples: logits (b, ..., classes), labels (b, ...)."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        """Values over all ranks, including those of `names`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Start from zero."""
        for metric in self.children():
            metric.reset()  # type: ignore[operator]

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Values (b, ...) by name, whose means training logs; `ce` are the cross-entropies, if already computed."""
        raise NotImplementedError

    def of_sample(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Values (b,) by name in `sampled`, of logits (b, ..., classes) and labels (b, ...)."""
        return {}


MakeScores = Callable[[], Scores]


class ClassScores(Scores):
    """Scores of a classifier: loss, accuracy, and the confusion matrix (classes, classes) with the truth in rows.

    Args:
        num_classes: number of logits.
        metric: scored beside the accuracy, under its own name: `balanced_accuracy` is the mean over classes of the
            recall, of those that some sample has; `f1` the mean of the F1 scores, of those that some sample has or is
            taken for; `top5` the share of samples whose label is among the five largest logits.

    Raises:
        BadInput: top5 of five classes or fewer.
    """

    names: tuple[str, ...] = ("acc", "correct")
    sampled = ("right", "predicted", "confidence", "label")

    def __init__(self, num_classes: int, metric: ClassMetric = "accuracy") -> None:
        super().__init__()
        self.metric = metric
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self.loss = ExactMean()
        if metric != "accuracy":
            self.names = (metric, *self.names)
        if metric == "top5":
            if num_classes <= TOP:
                expected = f"another metric: of {num_classes} classes the label is always among the first {TOP}"
                raise BadInput("metric", metric, expected)
            self.hits = ExactMean()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add b samples: logits (b, classes), labels (b,)."""
        self.confusion.update(logits, labels)
        self.loss.update(cross_entropy(logits, labels))
        if self.metric == "top5":
            self.hits.update((logits.topk(TOP).indices == labels[:, None]).any(1))

    def compute(self) -> dict[str, Tensor]:
        """{"loss", "acc", "correct"} and the metric over all ranks, float64."""
        confusion = self.confusion.compute().double()
        correct = confusion.trace()
        values = {"loss": self.loss.compute(), "acc": correct / confusion.sum(), "correct": correct}
        return values if self.metric == "accuracy" else {self.metric: self._metric(confusion), **values}

    def _metric(self, confusion: Tensor) -> Tensor:
        if self.metric == "top5":
            return self.hits.compute()
        right, labelled, taken = confusion.diag(), confusion.sum(1), confusion.sum(0)  # (classes,)
        found = {"balanced_accuracy": (right, labelled), "f1": (2 * right, labelled + taken)}
        share, whole = found[self.metric]
        return (share / whole)[whole > 0].mean()

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Accuracy: whether the largest logit is the label's."""
        return {"acc": logits.detach().argmax(1) == labels}

    def of_sample(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Whether it is right, the class that is predicted, that class's probability, and the label."""
        predicted, confidence = logits.argmax(1), widen(logits).softmax(1).amax(1)
        return {"right": predicted == labels, "predicted": predicted, "confidence": confidence, "label": labels}


class TokenScores(Scores):
    """Scores of a language model: loss per token in nats, bits per character, perplexity; ignores labels of -100.

    Args:
        tokens_per_character: of the text that is scored; 1 if tokens are characters.
    """

    names = ("loss", "bpc", "perplexity")
    sampled = ("bpc", "tokens")

    def __init__(self, tokens_per_character: float = 1.0) -> None:
        super().__init__()
        self.bits = tokens_per_character / math.log(2)  # per character, for a nat per token
        self.loss = ExactMean()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the tokens of b texts: logits (b, T, V), labels (b, T)."""
        losses = F.cross_entropy(widen(logits).flatten(0, 1), labels.flatten(), reduction="none")
        self.loss.update(losses[label_mask(labels).flatten()])

    def compute(self) -> dict[str, Tensor]:
        """{"loss", "bpc", "perplexity"} over all ranks."""
        loss = self.loss.compute()
        return {"loss": loss, "bpc": loss * self.bits, "perplexity": loss.exp()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Bits per character, (b, T)."""
        return {"bpc": (cross_entropy(logits, labels) if ce is None else ce).detach() * self.bits}

    def of_sample(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Bits per character, a mean over the tokens that count, and their number."""
        tokens = label_mask(labels).sum(1)
        bits = self.per_label(logits, labels)["bpc"].where(label_mask(labels), 0.0)
        return {"bpc": bits.sum(1) / tokens.clamp(min=1), "tokens": tokens}


class RunMetrics(Recorded, ChecksBatches):
    """The part of a module that logs its runs, such as the students of a distillation.

    A run's values are logged as `<run>/<stage>/<what>`, or `<stage>/<what>` for the only run of a module.

    Attributes:
        failed: runs that have failed, with the step and the term.
        samples: seen in training.
        of_labels: names of training values, as in `log_training`, that are means over the labelled rows alone.
        has_teacher: whether `beside_teacher` gives a teacher's logits.
    """

    has_teacher = False

    def __init__(self, runs: Iterable[str], scores: MakeScores) -> None:
        super().__init__()
        self.save_hyperparameters(self.init_args)
        self.runs = list(runs)
        # A list in the order of the runs: "" can't be the name of a submodule.
        self.scores = nn.ModuleList(scores() for _ in self.runs)
        beside = FIDELITY if self.has_teacher else ()
        self.tested = nn.ModuleList(PerSample((*self.scores_of(run).sampled, *beside)) for run in self.runs)
        self.train_sums: dict[str, float] = {}
        self.samples = 0
        self.epochs: list[dict[str, float]] = []  # of each the means in training, and the scores of its validation
        self.validated: dict[str, float] = {}  # in this epoch
        self.failed: dict[str, dict[str, Any]] = {}
        self.of_labels: set[str] = set()

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """Logits (b, ..., classes) of each run that has not failed, for inputs (b, ...)."""
        raise NotImplementedError

    def beside_teacher(self, inputs: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The teacher's logits, if the module has one, and those of `predict`."""
        return None, self.predict(inputs)

    def scores_of(self, run: str) -> Scores:
        """The evaluation scores of a run."""
        return cast("Scores", self.scores[self.runs.index(run)])

    def logged(self, values: Iterable[str]) -> dict[str, list[str]]:
        """Names that a fit logs in `validation`, at the end of an `epoch` and in a `step`, given those of a batch.

        The values of a batch are named `<run>/<what>`, as in `log_training`.
        """
        found = dict.fromkeys(name for name in values if name not in {LABELLED, TOKENS})
        scores = {run: dict.fromkeys(("loss", *self.scores_of(run).names)) for run in self.runs}
        validated = [
            f"{run}/{what}".lstrip("/") for run, names in scores.items() for what in names if what != "correct"
        ]
        bar = [what for what in BAR if any(name.endswith(what) for name in found)]
        return {
            "validation": [*tags(dict.fromkeys(validated), "val")],
            "epoch": [*tags({f"{name}_epoch": None for name in found}, "train")],
            "step": [*tags(found, "train"), *bar],
        }

    def log_training(self, values: Mapping[str, float], count: int, counts: Mapping[str, float]) -> None:
        """Log the global batch's means (`<run>/<what>` to value), and add them to the epoch's sums.

        `counts` has the fraction LABELLED of its `count` rows, if some labels are hidden, and of texts the mean number
        of TOKENS of a row. Means over no label, or no token, are left out.
        """
        self.samples += count
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
            shown = {what: [v for k, v in values.items() if k.endswith(what)] for what in BAR}
            bar = {what: sum(found) / len(found) for what, found in shown.items() if found}
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
        for scores in self.scores:
            scores.reset()  # type: ignore[operator]

    def on_test_epoch_start(self) -> None:
        """Reset the scores, and the values of single samples."""
        self.on_validation_epoch_start()
        for tested in self.tested:
            tested.reset()  # type: ignore[operator]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update the scores with a batch."""
        batch = Batch.of(checked(batch), 0, shared=False)
        with self.naming_inputs(batch.inputs):
            predicted = self.predict(batch.inputs)
        for run, logits in predicted.items():
            self.check_labels(logits, batch)
            self.scores_of(run).update(logits, batch.labels)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Update the scores with a batch, and keep the values of its samples."""
        batch = Batch.of(checked(batch), 0, shared=False)
        with self.naming_inputs(batch.inputs):
            teacher, found = self.beside_teacher(batch.inputs)
        for run, logits in found.items():
            scores = self.scores_of(run)
            self.check_labels(logits, batch)
            scores.update(logits, batch.labels)
            values = scores.of_sample(logits, batch.labels)
            if teacher is not None:
                values |= fidelity(logits, teacher, batch.labels)
            cast("PerSample", self.tested[self.runs.index(run)]).update(batch.index, values)

    def of_samples(self) -> dict[str, dict[str, Tensor]]:
        """Of each run that has not failed the values (n,) of the last test's samples, in their order; collective.

        They are those of `Scores.of_sample`, of `fidelity` beside a teacher, and `place`. A run has none if the loader
        does not number samples.
        """
        found = zip(self.runs, self.tested, strict=True)
        return {
            run: {name: values.cpu() for name, values in tested.compute().items()}  # type: ignore[operator]
            for run, tested in found
            if run not in self.failed
        }

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Tensor | dict[str, Tensor]:
        """Logits (b, ..., classes) of a batch, of inputs alone too; of several runs by their names."""
        inputs = batch.inputs if isinstance(batch, Batch) else batch[0] if isinstance(batch, list | tuple) else batch
        found = self.predict(inputs)
        return found.get("", found)

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
            values = {f"{run}/{k}" if run else k: v for k, v in values.items()}
            self._log_epoch(values, stage)
            if stage == "val" and self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
                self.validated |= tags({name: float(value) for name, value in values.items()}, stage)
            if stage == "test" and isinstance(scores, ClassScores):
                confusion = scores.confusion.compute().cpu()
                for logger in self.loggers:
                    if hasattr(logger, "log_confusion"):
                        names = getattr(self.trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
                        logger.log_confusion(run, confusion, names, self.global_step)

    def _log_epoch(self, values: Mapping[str, Any], stage: str) -> None:
        # All ranks have the same values: their maximum equals each bit for bit, where a mean would round.
        self.log_dict(tags(values, stage), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)


def tags(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """`kd/loss` -> `kd/train/loss`, `loss` -> `train/loss`."""
    return {"/".join([*name.split("/")[:-1], stage, name.split("/")[-1]]): value for name, value in values.items()}


def counts_of(batch: Batch) -> dict[str, Tensor]:
    """Of texts the TOKENS that count in each row, (b,); else LABELLED, if some labels are hidden."""
    if batch.labels.dim() > 1:
        if batch.label_weight is None:
            return {TOKENS: batch.labels.new_full(batch.labels.shape[:1], batch.labels.shape[1])}
        return {TOKENS: label_mask(batch.labels).sum(1)}
    return {} if batch.label_weight is None else {LABELLED: label_mask(batch.labels)}


def global_means(parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Means over the global batch of per-sample tensors (b,), summed in 64 bits and reduced in one message."""
    if not parts:
        return {}
    sums = replicas.all_reduce_sum(torch.stack([values.detach().double().sum() for values in parts.values()]))
    return dict(zip(parts, (sums / batch.count).tolist(), strict=True))
