"""TensorBoard: a logger with a folder for each run, the layout of charts, and means of curves over seeds."""

import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import custom_scalars

from harness.runs import files
from harness.runs.fonts import drawable
from harness.runs.launch import is_main_process
from harness.runs.session import Session
from lit_modules.tasks import known_metrics

SCORES = {metric.score: metric.chart for metric in known_metrics().values()}
MAIN = {f"val/{name}": title for name, title in SCORES.items()} | {
    "val/loss": "validation loss", "train/loss": "training loss",
}  # fmt: skip
# Over seeds: mean, minimum, maximum. Runs that have one of a chart's three tags, but not all, get a warning there.
BANDS = {tag: (f"seeds/{tag}_mean", f"seeds/{tag}_min", f"seeds/{tag}_max") for tag in MAIN}
COURSE = {
    "train/lr-.*": "learning rate", "train/grad_2.0_norm_total": "gradient norm, before clipping",
    "train/samples_per_sec": "samples a second", "train/peak_memory_mib": "peak memory, MiB",
}  # fmt: skip
MEAN = "mean"  # the folder of the runs of methods
NOT_AVERAGED = "test_class_acc/"
# TensorBoard's TIME SERIES tab sorts groups of charts by name and opens the first two. So curves to compare nets by are
# there a second time, in the first group, and costs, a point for each net, are behind all curves of the training.
COMPARED, COSTS = "compare", "training_cost"
FIRST = 4  # events of a file: its version, perhaps a purge with another version, and the charts


class RunsLogger(Logger):
    """Writes `<run>/<tag>` as `<tag>` of the TensorBoard run `root/<run>`, and other tags to `root/<default>`.

    Validation loss and score are written a second time, in the group of charts with which TensorBoard opens.

    Args:
        root: the folder of the runs.
        runs: their names.
        default: the run of values that are logged without a run's name.
        purge_step: TensorBoard drops earlier points from this step on, as after a resume; 0 deletes this part's files.
        part: ends the names of the files; "" stands for all parts.
        score: of the validation, by which nets are judged: one of `SCORES`.
    """

    name, version = "", ""  # of Lightning's loggers: the name of the folder, which is the run's own

    def __init__(
        self, root: Path, runs: Iterable[str], default: str, purge_step: int = 0, part: str = "", score: str = "acc"
    ) -> None:
        super().__init__()
        self.root, self.name, self.runs, self.default = Path(root), Path(root).name, set(runs), default
        self.score, self.purge_step, self.part = score, purge_step, part
        self._writers: dict[str, SummaryWriter] = {}

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        return self._writer(self.default)

    def _writer(self, run: str) -> SummaryWriter:
        if run not in self._writers:
            self._writers[run] = writer = open_writer(self.root / run, self.part, self.purge_step)
            if not self.part and not _has_layout(self.root / run):
                writer.add_custom_scalars(layout(self.score))
        return self._writers[run]

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            run, _, tag = name.partition("/")
            run, tag = (run, tag) if run in self.runs else (self.default, name)
            if tag == "epoch":
                continue
            self._writer(run).add_scalar(tag, value, step)
            if tag in {f"val/{self.score}", "val/loss"}:
                self._writer(run).add_scalar(f"{COMPARED}/{tag}", value, step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `harness.reports.hparams` writes a run's options with its results."""

    @rank_zero_only
    def log_confusion(self, run: str, confusion: Tensor, names: Sequence[str] | None, step: int) -> None:
        """Draw the confusion matrix (classes, classes) and write each class's accuracy."""
        writer = self._writer(run or self.default)
        writer.add_figure("test/confusion", confusion_figure(confusion.cpu(), names), step)
        shares = confusion.diag() / confusion.sum(1).clamp(min=1)
        for name, share in zip(names or range(len(confusion)), shares.tolist(), strict=True):
            writer.add_scalar(f"test_class_acc/{name}", share, step)

    @rank_zero_only
    def save(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close all writers; later values open them again and purge nothing."""
        for writer in self._writers.values():
            writer.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writers": {}}


def open_writer(folder: Path, part: str = "", purge_step: int = 0) -> SummaryWriter:
    """Open a writer of a run's events, or of a part of them, and purge those of an interrupted session."""
    if purge_step:  # TensorBoard sorts event files by second, then by process: a new file must be the last
        while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.02)
    else:
        for file in folder.glob(f"events.out.tfevents.*{part}"):
            if files.is_recorded(file):
                file.unlink()
    writer = SummaryWriter(str(folder), purge_step=purge_step or None, filename_suffix=part)
    files.record(writer._get_file_writer().event_writer._file_name)
    return writer


def _has_layout(folder: Path) -> bool:
    """Return whether an earlier session wrote the charts, which it does with its first value."""
    events = (islice(EventFileLoader(str(file)).Load(), FIRST) for file in folder.glob("events.out.tfevents.*"))
    return any(value.tag == CONFIG_SUMMARY_TAG for event in chain(*events) for value in event.summary.value)


def layout(score: str) -> dict[str, dict[str, list[Any]]]:
    """Return the charts of the CUSTOM SCALARS tab, by category and title."""
    of_other_scores = {f"val/{name}" for name in SCORES if name != score}
    # TensorBoard takes a chart's tags as the beginning of what it shows.
    main = {title: ["Multiline", [f"{tag}$"]] for tag, title in MAIN.items() if tag not in of_other_scores}
    return {"scores": main, "training": {title: ["Multiline", [f"{tag}$"]] for tag, title in COURSE.items()}}


def log_text(folder: Path, tag: str, text: str) -> None:
    """Show a text verbatim in the TEXT tab of a finished run."""
    with open_writer(folder, ".text") as writer:
        writer.add_text(tag, indent(text))


def indent(text: str) -> str:
    """Indent the text as a Markdown code block, shown verbatim."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


def confusion_figure(confusion: Tensor | np.ndarray, names: Sequence[str] | None) -> Figure:
    """Draw counts or percentages (classes, classes), a row for each true class, coloured by the root of their share.

    Up to 10 classes fill 350 pixels, at which TensorBoard shows a picture without leaving out any. Larger pictures have
    to be seen at their actual size. Counts are written for up to 25 classes, names for up to 120.
    """
    counts = np.asarray(confusion)
    classes = len(counts)
    counted = classes <= 25
    side = max(3.5, 0.6 + (0.29 if counted else 0.12) * min(classes, 120))
    figure = Figure(figsize=(side, side), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shares = np.sqrt(counts / counts.sum(1, keepdims=True).clip(min=1))  # so that single errors are seen
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="true")
    if classes <= 120:
        labels = drawable(names or [str(i) for i in range(classes)])
        look: dict[str, Any] = {"fontsize": 8 if counted else 6, "fontfamily": labels.fonts}
        axes.set_xticks(range(classes), labels.names, rotation=0 if max(map(len, labels.names)) < 3 else 90, **look)
        axes.set_yticks(range(classes), labels.names, **look)
        axes.set_title(labels.note, fontsize=7)
    if counted:
        for row, column in np.argwhere(counts.round() > 0).tolist():
            style: dict[str, Any] = {
                "fontsize": 7.5,
                "color": "white" if shares[row, column] > 0.6 else "black",
                "in_layout": False,
            }
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", **style)
    return figure


def log_means(session: Session, nets: Sequence[str]) -> None:
    """Write OUT/mean/<net> for each net, over the seeds that have finished all of them, if two or more have.

    A curve's mean has the steps that all of these seeds have.
    """
    if not (session.tensorboard and is_main_process()):
        return
    folders = [session.out / f"seed{seed}" for seed in session.config.seeds]
    finished = [folder for folder in folders if all((folder / net / "weights.pt").exists() for net in nets)]
    if len(finished) < 2:
        return
    means_by_net = {net: summary([curves(folder / net) for folder in finished]) for net in nets}
    files_of_seeds = chain.from_iterable(folder.glob("*/events*") for folder in finished)
    times = (event.wall_time for file in files_of_seeds for event in islice(EventFileLoader(str(file)).Load(), 1))
    begin = min(times, default=1.0) - 1  # before any run of a seed: TensorBoard gives its seven colours in this order
    for name, means in means_by_net.items():
        charts = {f"{MAIN[tag]}, mean and range": ["Margin", [*BANDS[tag]]] for tag in MAIN if tag in means}
        with open_writer(session.out / MEAN / name) as writer:
            writer._get_file_writer().add_summary(custom_scalars({"means over seeds": charts}), walltime=begin)
            for tag, events in means.items():
                for event in events:
                    writer.add_scalar(tag, event.value, event.step, event.wall_time)


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
