"""Values of single test samples: how results.json has them, and what they say together.

`test_right`: a bit for each sample. `test_predicted`: its class. Of a teacher `test_labels`, and `test_places` in the
data set, unless they are counted from 0. All are in base64; before whole numbers stands their type, as in `u1:`. Of
texts `test_sample_bpc`: a list of numbers, each the mean over a text's own tokens that count; a text without one has
none. Of responses `test_sample_bpb`: for each prompt, the bits of its responses over the mean number of bytes of a
prompt's; of a teacher also `test_weights`, these numbers. Means over the samples, or over the tokens of texts, are
`test_ece`, and of students `test_kl` and `test_agreement`.
"""

import base64
from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from harness.reports.results import Packed, Results
from harness.reports.uncertainty import Interval, crossed_interval
from lit_modules.tasks import Task

DIGITS = 6  # that are kept of a value

Units = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def summarize(
    task: Task, values: Mapping[str, Tensor], units: Units | None = None
) -> tuple[dict[str, float | None], dict[str, str | list[float]]]:
    """Compute what a record keeps of a net's tested samples, of which these are the values (n,).

    `units` gives more values (n,) of the samples at places (n,) of the test set: see `InMemoryData.test_units`.

    Returns:
        Figures over all samples, and values of single samples, both by key; nothing of none.
    """
    arrays = {name: tensor.numpy() for name, tensor in values.items()}
    if not len(places := arrays.get("place", np.zeros(0))):
        return {}, {}
    if units is not None:
        arrays |= units(places.astype(np.int64))
    means = {f"test_{name}": mean if np.isfinite(mean) else None for name, mean in task.average_samples(arrays).items()}
    kept = {f"test_{name}": pack(value) for name, value in task.keep_samples(arrays).items()}
    if "unit" not in arrays and (places != np.arange(len(places))).any():
        kept["test_places"] = pack_classes(places)
    return means, kept


def pack(values: np.ndarray) -> str | list[float]:
    """Pack values of samples (n,) for a record: booleans and whole numbers in base64, others rounded."""
    if values.dtype == bool:
        return pack_bits(values)
    if np.issubdtype(values.dtype, np.integer):
        return pack_classes(values)
    return [round(value, DIGITS) for value in values.tolist()]


def pack_bits(right: np.ndarray) -> str:
    """Pack booleans (n,), eight to a byte, in base64."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpack(stored: str, count: int) -> np.ndarray:
    """Unpack `count` bits as, float64; ValueError if there are not so many."""
    values = np.unpackbits(np.frombuffer(base64.b64decode(stored, validate=True), dtype=np.uint8))
    if len(values) - 7 > count or len(values) < count:
        raise ValueError(f"{len(values)} bits for {count} samples")
    return values[:count].astype(np.float64)


def pack_classes(numbers: np.ndarray) -> str:
    """Pack whole numbers (n,) of 0 or more into the smallest type that fits: its name, a colon, base64."""
    kind = f"u{np.min_scalar_type(int(numbers.max(initial=0))).itemsize}"
    return f"{kind}:{base64.b64encode(numbers.astype(f'<{kind}').tobytes()).decode()}"


def unpack_classes(stored: Packed) -> np.ndarray:
    """Unpack whole numbers (n,)."""
    kind, _, data = str(stored).partition(":")
    return np.frombuffer(base64.b64decode(data, validate=True), dtype=f"<{kind}").astype(np.int64)


def difference_over_both(results: Results, student: str, baseline: str) -> Interval | None:
    """Compute the interval, over seeds and test samples, of a student's difference to the baseline.

    Samples of unequal weights are such that the metric is a ratio of two sums over them: the interval is that of their
    residuals, as the variance of a ratio is by linearisation (W. G. Cochran, "Sampling Techniques", 1977, 6.5).

    Seeds in which both finished count. None for a metric that is no mean over samples, or without their values.
    """
    key, students = results.metric.of_samples, results.students
    values = [students[name].samples.get(key) or [] for name in (student, baseline)] if key else [[], []]
    pairs = [(a, b) for a, b in zip(*values, strict=False) if a is not None and b is not None]
    count = len(labels(results))
    if not pairs or (isinstance(pairs[0][0], str) and not count):
        return None
    differences = np.stack([_values(a, count) - _values(b, count) for a, b in pairs])
    if stored := results.sampled.get("test_weights"):
        weights = unpack_classes(stored)
        differences = differences + differences.mean(1, keepdims=True) * (1 - weights / weights.mean())
    return crossed_interval(differences)


def _values(stored: Packed, count: int) -> np.ndarray:
    return unpack(stored, count) if isinstance(stored, str) else np.asarray(stored)


def labels(results: Results) -> np.ndarray:
    """Return the labels (n,) of the tested samples; none in results without them."""
    return unpack_classes(results.sampled.get("test_labels", "u1:"))
