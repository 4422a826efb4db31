"""TensorBoard runs of methods: each curve's mean over the seeds, and the range of the main ones."""

from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

from harness.runs.tensorboard import BANDS, log_curves

MEAN = "mean"  # the folder of these runs
NOT_AVERAGED = "test_class_acc/"


def log_means(out: Path, seeds: Sequence[int], nets: Sequence[str]) -> None:
    """Write OUT/mean/<net> for each net, over the seeds that have finished all of them, if two or more have.

    A curve's mean has the steps that all of these seeds have.
    """
    folders = [out / f"seed{seed}" for seed in seeds]
    finished = [folder for folder in folders if all((folder / net / "weights.pt").exists() for net in nets)]
    if len(finished) < 2:
        return
    means_by_net = {net: summary([curves(folder / net) for folder in finished]) for net in nets}
    times = (event.wall_time for run in means_by_net.values() for events in run.values() for event in events)
    begin = min(times, default=1.0) - 1  # before any run of a seed
    for name, means in means_by_net.items():
        log_curves(out / MEAN / name, means, begin)


def curves(folder: Path) -> dict[str, list[ScalarEvent]]:
    """Return all scalars of a TensorBoard run by tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if not tag.startswith(NOT_AVERAGED)}


def summary(runs: Sequence[dict[str, list[ScalarEvent]]]) -> dict[str, list[ScalarEvent]]:
    """Return mean curves of runs by tag, and of those in `BANDS` the smallest and the largest value at each step."""
    events: dict[str, list[ScalarEvent]] = {}
    for tag in runs[0]:
        if not all(tag in run for run in runs):
            continue
        points = [{event.step: event for event in run[tag]} for run in runs]
        for step in sorted(set.intersection(*map(set, points))):
            values = [curve[step].value for curve in points]
            mean = sum(values) / len(values)
            band = zip(BANDS.get(tag, ()), (mean, min(values), max(values)), strict=False)
            numbers = {tag: mean, **dict(band)}
            for name, value in numbers.items():
                events.setdefault(name, []).append(ScalarEvent(points[0][step].wall_time, step, value))
    return events
