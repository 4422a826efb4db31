"""TensorBoard: a logger with a folder for each run of a module, and rows of the HPARAMS tab."""

import itertools
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from harness.runs import files


class RunsLogger(Logger):
    """Writes `<run>/<tag>` as `<tag>` of the TensorBoard run `root/<run>`, and other tags to `root/<default>`.

    Args:
        root: the folder of the runs.
        runs: their names.
        default: the run of values that are logged without a run's name.
        purge_step: TensorBoard drops earlier points from this step on, as after a resume; 0 deletes this part's files.
        part: ends the names of the files; "" stands for all parts.
    """

    name, version = "", ""  # of Lightning's loggers: the name of the folder, which is the run's own

    def __init__(self, root: Path, runs: Iterable[str], default: str, purge_step: int = 0, part: str = "") -> None:
        super().__init__()
        self.root, self.name, self.runs, self.default = Path(root), Path(root).name, set(runs), default
        self.purge_step, self.part = purge_step, part
        self._writers: dict[str, SummaryWriter] = {}

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The default run's writer."""
        return self._writer(self.default)

    def _writer(self, run: str) -> SummaryWriter:
        if run not in self._writers:
            self._writers[run] = _summary_writer(self.root / run, self.part, self.purge_step)
        return self._writers[run]

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write each value to its run."""
        for name, value in metrics.items():
            run, _, tag = name.partition("/")
            run, tag = (run, tag) if run in self.runs else (self.default, name)
            if tag != "epoch":
                self._writer(run).add_scalar(tag, value, step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `log_run` writes a run's options with its results."""

    @rank_zero_only
    def log_confusion(self, run: str, confusion: Tensor, names: Sequence[str] | None, step: int) -> None:
        """Draw the confusion matrix (classes, classes) and write each class's accuracy."""
        writer = self._writer(run or self.default)
        writer.add_figure("test/confusion", confusion_figure(confusion, names), step)
        shares = confusion.diag() / confusion.sum(1).clamp(min=1)
        for name, share in zip(names or range(len(confusion)), shares.tolist(), strict=True):
            writer.add_scalar(f"test_class_acc/{name}", share, step)

    @rank_zero_only
    def save(self) -> None:
        """Flush all writers."""
        for writer in self._writers.values():
            writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close all writers; later values open them again and purge nothing."""
        for writer in self._writers.values():
            writer.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writers": {}}


def _summary_writer(folder: Path, part: str = "", purge_step: int = 0) -> SummaryWriter:
    """A writer of a run's events, or of a part of them, after purging those of an interrupted session."""
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


def log_run(folder: Path, options: Mapping[str, Any], values: Mapping[str, float | None]) -> None:
    """Write a finished run's row of the HPARAMS tab: its options, and values as scalars beside its curves."""
    plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in options.items()}
    with _summary_writer(folder, ".hparams") as writer:
        for tag, value in values.items():
            if value is not None:
                writer.add_scalar(tag, value)
        for summary in hparams(plain, {})[1:]:  # without that of the experiment the tab shows the union of all runs
            writer._get_file_writer().add_summary(summary)


def log_text(folder: Path, tag: str, text: str) -> None:
    """Show a text verbatim in the TEXT tab of a finished run."""
    with _summary_writer(folder, ".text") as writer:
        writer.add_text(tag, indented(text))


def indented(text: str) -> str:
    """The text as a Markdown code block, shown verbatim."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


def confusion_figure(confusion: Tensor, names: Sequence[str] | None) -> Figure:
    """A picture of counts (classes, classes), a row for each true class, coloured by share of the row."""
    classes = len(confusion)
    side = min(3 + 0.35 * classes, 12)
    figure = Figure(figsize=(side, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow((confusion / confusion.sum(1, keepdim=True).clamp(min=1)).tolist(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true")
    if classes <= 25:
        labels = list(names) if names else [str(i) for i in range(classes)]
        axes.set_xticks(range(classes), labels, rotation=90)
        axes.set_yticks(range(classes), labels)
        for row, column in itertools.product(range(classes), repeat=2):
            axes.text(column, row, str(int(confusion[row, column])), ha="center", va="center", fontsize=7)
    return figure
