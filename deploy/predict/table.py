"""Predictions as a table in CSV, and scores of those whose labels are known."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from deploy.predict.inputs import Inputs
from deploy.predict.predictor import Guesses
from deploy.predict.raw import READ
from lit_modules.tasks.classification import TOP, ClassMetric, ClassScores

SCORED: dict[ClassMetric, str] = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "f1": "F1 score"}
HEADS = ("file", "class", "probability")  # each table begins with them
CHUNK = 4096  # samples that are scored at once


def as_csv(inputs: Inputs, classes: Sequence[str], guesses: Mapping[str, Guesses], read: Tensor, top: int) -> str:
    """Write a line of heads, then one for each input, in order; of one that could not be READ nothing but its name.

    `guesses` are the student's, and perhaps the teacher's. Probabilities have nine digits: all of a float32.
    """
    student, *teachers = guesses.items()
    heads = list(HEADS)
    for number in range(2, top + 1):
        heads += [f"class_{number}", f"probability_{number}"]
    for name, _ in teachers:
        heads += [name, f"{name}_probability"]
    heads += ["label"] if inputs.labels else []
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heads)
    columns = [(student[1], top), *((of_teacher, 1) for _, of_teacher in teachers)]
    for place, name in enumerate(inputs.names):
        cells = [cell for of_net, k in columns for cell in _best(of_net, place, k, classes)]
        row = cells if read[place] == READ else [""] * len(cells)
        table.writerow([name, *row, *([inputs.labels[place]] if inputs.labels else [])])
    return text.getvalue()


def _best(guesses: Guesses, place: int, k: int, classes: Sequence[str]) -> Iterator[str]:
    for number, probability in zip(guesses.classes[place, :k], guesses.probabilities[place, :k], strict=True):
        yield classes[int(number)]
        yield f"{float(probability):.9g}"


def scores(inputs: Inputs, classes: Sequence[str], guesses: Mapping[str, Guesses], read: Tensor) -> Iterator[str]:
    """Yield a line for each net with scores of the inputs whose labels are known, and one of their agreement."""
    is_read = read == READ
    if inputs.labels:
        numbers = {name: number for number, name in enumerate(classes)}
        labels = torch.tensor([numbers.get(name, -1) for name in inputs.labels])
        labelled = is_read & (labels >= 0)
        for name, of_net in guesses.items():
            if labelled.any():
                whose = f"{name}: " if len(guesses) > 1 else ""
                yield f"{whose}{_score(of_net.classes[labelled], labels[labelled], len(classes))}"
    if len(guesses) > 1 and is_read.any():
        one, other = (of_net.classes[is_read, 0] for of_net in guesses.values())
        share = float((one == other).double().mean())
        yield f"{' and '.join(guesses)} agree on {100 * share:.2f} % of {len(one):,} inputs"


def _score(guessed: Tensor, labels: Tensor, classes: int) -> str:
    """Say how good guesses (n, k) of labels (n,) are."""
    parts = []
    for metric, word in SCORED.items():
        of_metric = ClassScores(classes, metric)
        for best, true in zip(guessed[:, 0].split(CHUNK), labels.split(CHUNK), strict=True):
            of_metric.update(F.one_hot(best, classes).float(), true)
        values = of_metric.compute()
        value = values["acc" if metric == "accuracy" else metric]
        of_all = f" ({int(values['correct']):,} of {len(labels):,})" if metric == "accuracy" else ""
        parts.append(f"{word} {100 * float(value):.2f} %{of_all}")
    if classes > TOP:
        hits = (guessed[:, :TOP] == labels[:, None]).any(1).double().mean()
        parts.append(f"top-{TOP} accuracy {100 * float(hits):.2f} %")
    return ", ".join(parts)
