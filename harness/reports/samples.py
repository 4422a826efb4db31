"""Values of single test samples: how results.json has them, and what they say together.

`test_right`: a bit for each sample. `test_predicted`: its class. Of a teacher `test_labels`, and `test_places` in the
data set, unless they are counted from 0. All are in base64; before whole numbers stands their type, as in `u1:`,
without which they have four bytes each, as older versions wrote them. Of texts `test_sample_bpc`: a list of numbers,
each the mean over a text's own tokens that count; a text without one has none. Means over the samples, or over the
tokens of texts, are `test_ece`, and of students `test_kl` and `test_agreement`.
"""

import base64
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from harness.reports.report import Facts
from harness.reports.uncertainty import Interval, crossed_interval
from harness.runs.records import NetRecord
from lit_modules.tasks import METRICS, Metric, Task

KEYS = tuple(metric.of_samples for metric in METRICS.values() if metric.of_samples)
MEANS = ("test_ece", "test_kl", "test_agreement")
KEPT = (*KEYS, "test_predicted", *MEANS)
OF_SAMPLES = ("test_labels", "test_places")  # the same for each net; the teacher's entry has them
DIGITS = 6  # that are kept of a value


def recorded(task: Task, values: Mapping[str, Tensor]) -> tuple[dict[str, float | None], dict[str, str | list[float]]]:
    """Compute what a record keeps of a net's tested samples, of which these are the values (n,).

    Returns:
        Figures over all samples, and values of single samples, both by key; nothing of none.
    """
    arrays = {name: tensor.numpy() for name, tensor in values.items()}
    if not len(places := arrays.get("place", np.zeros(0))):
        return {}, {}
    means = {f"test_{name}": mean if np.isfinite(mean) else None for name, mean in task.average_samples(arrays).items()}
    kept = {f"test_{name}": packed(value) for name, value in task.keep_samples(arrays).items()}
    if (places != np.arange(len(places))).any():
        kept["test_places"] = classes(places)
    return means, kept


def packed(values: np.ndarray) -> str | list[float]:
    """Values of samples (n,) as a record has them: booleans and whole numbers in base64, others rounded."""
    if values.dtype == bool:
        return bits(values)
    if np.issubdtype(values.dtype, np.integer):
        return classes(values)
    return [round(value, DIGITS) for value in values.tolist()]


def bits(right: np.ndarray) -> str:
    """Booleans (n,), eight to a byte, in base64."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpacked(stored: str, count: int) -> np.ndarray:
    """The `count` values of packed bits, float64; ValueError if there are not so many."""
    found = np.unpackbits(np.frombuffer(base64.b64decode(stored, validate=True), dtype=np.uint8))
    if len(found) - 7 > count or len(found) < count:
        raise ValueError(f"{len(found)} bits for {count} samples")
    return found[:count].astype(np.float64)


def classes(numbers: np.ndarray) -> str:
    """Whole numbers (n,) of 0 or more, in as few bytes each as the largest needs: the type's name, a colon, base64."""
    kind = f"u{np.min_scalar_type(int(numbers.max(initial=0))).itemsize}"
    return f"{kind}:{base64.b64encode(numbers.astype(f'<{kind}').tobytes()).decode()}"


def unpacked_classes(stored: str) -> np.ndarray:
    """The whole numbers (n,) again."""
    kind, _, data = stored.rpartition(":")
    return np.frombuffer(base64.b64decode(data, validate=True), dtype=f"<{kind or 'i4'}").astype(np.int64)


def kept(records: Sequence[NetRecord]) -> Facts:
    """What a net's entry has of its seeds' samples; nothing where no seed has any."""
    facts = [{} if record.failed else {**record.figures, **record.samples} for record in records]
    keys = [key for key in KEPT if any(key in record.samples or key in record.figures for record in records)]
    return {key: [values.get(key) for values in facts] for key in keys}


def of_samples(records: Sequence[NetRecord]) -> Facts:
    """What the teacher's entry has of the samples themselves."""
    return {key: records[0].samples[key] for key in OF_SAMPLES if key in records[0].samples}


def both(results: Facts, student: str, baseline: str, metric: Metric) -> Interval | None:
    """The interval, over seeds and test samples, of a student's difference to the baseline.

    Seeds in which both finished count. None for a metric that is no mean over samples, or without their values.
    """
    key, students = metric.of_samples, results["students"]
    pairs = zip(students[student].get(key) or [], students[baseline].get(key) or [], strict=False)
    stored, count = [pair for pair in pairs if None not in pair], len(labels(results))
    in_bits = any(isinstance(values, str) for pair in stored for values in pair)
    if not stored or (in_bits and not count):
        return None
    if in_bits:
        stored = [(unpacked(one, count), unpacked(other, count)) for one, other in stored]
    return crossed_interval(np.stack([np.asarray(one) - np.asarray(other) for one, other in stored]))


def labels(results: Facts) -> np.ndarray:
    """The labels (n,) of the tested samples; none in results without them."""
    return unpacked_classes(results["teacher"].get("test_labels", ""))
