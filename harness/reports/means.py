"""TensorBoard runs of methods: each curve's mean over the seeds, and the range of the main ones."""

import json
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

from harness.runs.tensorboard import BANDS, log_curves

MEAN = "mean"  # the folder of these runs
NOT_AVERAGED = "test_class_acc/"


def log_means(out: Path, seeds: Sequence[int], fit: str) -> None:
    """Write OUT/mean/<name> for each name that a fit trains, over the seeds that have finished it, if two or more have.

    A curve's mean has the steps that all of these seeds have.
    """
    records = {seed: out / f"seed{seed}" / f"{fit}.json" for seed in seeds}
    folders = [(out / f"seed{seed}", record) for seed, record in records.items() if record.exists()]
    if len(folders) < 2:
        return
    for name in json.loads(folders[0][1].read_text())["runs"]:
        log_curves(out / MEAN / name, summary([curves(folder / name) for folder, _ in folders]))


def curves(folder: Path) -> dict[str, list[ScalarEvent]]:
    """All scalars of a TensorBoard run by tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if not tag.startswith(NOT_AVERAGED)}


def summary(runs: Sequence[dict[str, list[ScalarEvent]]]) -> dict[str, list[ScalarEvent]]:
    """Mean curves of runs by tag, and of those in `BANDS` the smallest and the largest value at each step."""
    found: dict[str, list[ScalarEvent]] = {}
    for tag in runs[0]:
        if not all(tag in run for run in runs):
            continue
        points = [{event.step: event for event in run[tag]} for run in runs]
        for step in sorted(set.intersection(*map(set, points))):
            values = [curve[step].value for curve in points]
            numbers = {tag: sum(values) / len(values)}
            if tag in BANDS:
                numbers |= dict(zip(BANDS[tag], (min(values), max(values)), strict=True))
            for name, value in numbers.items():
                found.setdefault(name, []).append(ScalarEvent(points[0][step].wall_time, step, value))
    return found
