"""Values of single test samples: how results.json has them, and intervals over seeds and samples together."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.reports.metrics import ACCURACY, BITS, Metric
from harness.reports.report import Facts
from harness.reports.uncertainty import Interval, crossed_interval

# Keys of a net's entry, by the metric whose mean over the samples they are.
KEYS = {ACCURACY.name: "test_right", BITS.name: "test_sample_bpc"}
DIGITS = 6  # that are kept of a value


def packed(values: Any, key: str) -> Any:
    """Values (n,) as JSON has them: a bit for each sample in base64, or rounded numbers."""
    array = np.asarray(values, dtype=np.float64)
    if key == KEYS[ACCURACY.name]:
        return base64.b64encode(np.packbits(array != 0).tobytes()).decode()
    return [round(value, DIGITS) for value in array.tolist()]


def unpacked(stored: Any, count: int) -> np.ndarray:
    """The values (n,) float64; of packed bits the first `count`, or ValueError if there are not so many."""
    if isinstance(stored, str):
        bits = np.unpackbits(np.frombuffer(base64.b64decode(stored, validate=True), dtype=np.uint8))
        if len(bits) - 7 > count or len(bits) < count:
            raise ValueError(f"{len(bits)} bits for {count} samples")
        return bits[:count].astype(np.float64)
    return np.asarray(stored, dtype=np.float64)


def both(entry: Facts, baseline: Facts, metric: Metric, count: int) -> Interval | None:
    """The interval, over seeds and test samples, of a student's difference to the baseline.

    Seeds in which both finished count. None for a metric that is no mean over samples, or without their values.
    """
    key = KEYS.get(metric.name, "")
    pairs = zip(entry.get(key) or [], baseline.get(key) or [], strict=False)
    rows = [
        unpacked(own, count) - unpacked(other, count) for own, other in pairs if own is not None and other is not None
    ]
    return crossed_interval(np.stack(rows)) if rows else None


def kept(rows: Sequence[Facts]) -> Mapping[str, list[Any]]:
    """What a net's entry has of its seeds' samples; nothing where no seed has any."""
    keys = [key for key in KEYS.values() if any(key in facts for facts in rows)]
    return {key: [None if facts.get("failed") else facts.get(key) for facts in rows] for key in keys}
