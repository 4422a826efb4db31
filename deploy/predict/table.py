"""Predictions as a table in CSV, embeddings as a file of numpy, and scores of those whose labels are known."""

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np
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


def as_csv(inputs: Inputs, classes: Sequence[str], guesses: Guesses, read: Tensor, top: int) -> str:
    """Write a line of heads, then one for each input, in order; of one that could not be READ nothing but its name.

    Probabilities have nine digits: all of a float32.
    """
    heads = list(HEADS)
    for number in range(2, top + 1):
        heads += [f"class_{number}", f"probability_{number}"]
    heads += ["label"] if inputs.labels else []
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heads)
    for place, name in enumerate(inputs.names):
        row = [*_best(guesses, place, top, classes)] if read[place] == READ else [""] * 2 * top
        table.writerow([name, *row, *([inputs.labels[place]] if inputs.labels else [])])
    return text.getvalue()


def as_parquet(inputs: Inputs, embeddings: Tensor, read: Tensor) -> bytes:
    """Write a file of Parquet with a row for each input: its `name`, its `text` if it is one, and its `embedding`.

    An input that was not READ has none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = [x if ok else None for x, ok in zip(embeddings.float().tolist(), (read == READ).tolist(), strict=True)]
    columns = {"name": pa.array(inputs.names)}
    if inputs.texts:
        columns["text"] = pa.array([text.decode(errors="replace") for text in inputs.texts])
    columns["embedding"] = pa.array(vectors, pa.list_(pa.float32(), embeddings.shape[1]))
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def as_npz(inputs: Inputs, embeddings: Tensor, read: Tensor) -> bytes:
    """Write a file of numpy with the `names` of inputs and their `embeddings` (n, D) float32, NaN where not READ."""
    known = embeddings.float().where((read == READ)[:, None], torch.nan)
    file = io.BytesIO()
    np.savez(file, names=np.array(inputs.names), embeddings=known.numpy())
    return file.getvalue()


def _best(guesses: Guesses, place: int, k: int, classes: Sequence[str]) -> Iterator[str]:
    for number, probability in zip(guesses.classes[place, :k], guesses.probabilities[place, :k], strict=True):
        yield classes[int(number)]
        yield f"{float(probability):.9g}"


def scores(inputs: Inputs, classes: Sequence[str], guesses: Guesses, read: Tensor) -> str:
    """Return a line with scores of the inputs whose labels are known; empty if none are."""
    numbers = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers.get(name, -1) for name in inputs.labels or [""] * len(inputs.names)])
    labelled = (read == READ) & (labels >= 0)
    return _score(guesses.classes[labelled], labels[labelled], len(classes)) if labelled.any() else ""


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
