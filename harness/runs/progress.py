"""The progress of a fit: a live display on a terminal, lines elsewhere; its speed and memory in the log."""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from harness.runs.plans import FitPlan
from harness.runs.records import FitRecord
from lit_modules.tasks import TASKS, task_class
from lit_modules.training.loop import Loop
from lit_modules.training.training_log import is_logged, tags

# Of each task the metrics from which the user chooses come before the default, which is scored in any case.
METRICS = [metric for name in TASKS for metric in reversed([*task_class(name).metrics.values()])]
SCORES = [f"val/{metric.score}" for metric in METRICS]
IN_BITS = {f"val/{metric.score}" for metric in METRICS if metric.unit == "bits"}
TAGS = (*SCORES, "val/loss", "train/acc", "train/loss")
SILENCE = 9.0  # seconds without a line, at most, where batches are shorter
REDRAW = 0.1  # seconds between two pictures of the display
MARGIN = 6  # lines of the screen beside the table
Rest = Callable[[float, float], str]
Show = Callable[[bool], Callback]  # from whether a display may be live to the callback that shows a fit


def is_live() -> bool:
    """Return whether output goes to a terminal on which lines can be redrawn."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in {"dumb", "unknown"}:
        return False
    return 0 not in os.get_terminal_size(sys.stdout.fileno())


def progress(label: str, rest: Rest | None = None) -> Show:
    """Return a maker of displays, on a terminal, or lines; the arguments are those of `Display`."""
    return lambda live: Display(label, rest) if live and is_live() else Lines(label)


class Lines(Callback):
    """Prints a line an epoch, or a validation where training is counted in steps, and at least one every 9 seconds.

    A line has the label and a score of each run, of validation, else of training; beside the first bits, the loss.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        # Start of the epoch, time of the last line, end of the last batch.
        self._began = self._spoke = self._batch = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._spoke = self._batch = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_epochs != -1:
            self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._break_silence(
            trainer, pl_module, "batch", trainer.fit_loop.epoch_loop.batch_idx, trainer.num_training_batches
        )

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._break_silence(trainer, pl_module, "validation batch", batch_idx, sum(trainer.num_val_batches))

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._break_silence(trainer, pl_module, "test batch", batch_idx, sum(trainer.num_test_batches))

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._break_silence(trainer, pl_module, "inputs, batch", batch_idx, sum(trainer.num_predict_batches))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_epochs == -1 and not trainer.sanity_checking:
            self._say(trainer, self._scores(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_epochs != -1:
            self._say(trainer, self._scores(trainer, pl_module))

    def _break_silence(self, trainer: Trainer, pl_module: LightningModule, what: str, index: int, total: float) -> None:
        now = time.monotonic()
        next_batch, self._batch = 2 * now - self._batch, now
        if next_batch - self._spoke > SILENCE:
            place = "" if what == "batch" and trainer.max_epochs == -1 else f"{what} {_of(index + 1, total)}"
            self._say(trainer, place, "" if trainer.testing or trainer.predicting else losses(pl_module))

    def _place(self, trainer: Trainer) -> str:
        if trainer.testing:
            return "test"
        if trainer.predicting:
            return ""
        if trainer.max_epochs == -1:
            return f"step {_of(trainer.global_step, trainer.max_steps)}"
        return f"epoch {_of(trainer.current_epoch + 1, trainer.max_epochs or -1)}"

    def _scores(self, trainer: Trainer, module: LightningModule) -> str:
        tag, values = scores(trainer, module)
        words = _by_run(values)
        beside = losses(module) if tag in IN_BITS and trainer.current_epoch == 0 else ""
        return "  ".join(filter(None, [f"{time.monotonic() - self._began:.1f} s", words and f"{tag} {words}", beside]))

    def _say(self, trainer: Trainer, *parts: str) -> None:
        self._spoke = time.monotonic()
        if trainer.is_global_zero:
            self._print("  ".join(filter(None, [self.label, self._place(trainer), *parts])))

    def _print(self, line: str) -> None:
        print(line, flush=True)


class Display(Lines):
    """Shows the state of a Loop's fit below the lines of finished epochs: scores, speed, time left.

    `rest` gives a text about the whole run, from the seconds that this fit has left and takes in all.
    """

    def __init__(self, label: str, rest: Rest | None = None) -> None:
        super().__init__(label)
        self._rest = rest
        self._live: Live | None = None
        self._drawn = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._start, self._first = time.monotonic(), trainer.global_step
        self._samples = cast("Loop", pl_module).training_log.samples
        if trainer.is_global_zero:
            # No thread refreshes it: ranks may be forked.
            self._live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)
            self._live.start()
            self._live.console.show_cursor()  # which a process that is killed could not bring back

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Redraw the display, at most ten times a second."""
        now = time.monotonic()
        if self._live and now - self._drawn > REDRAW:
            self._drawn = now
            self._live.update(self._view(self._live.console, trainer, cast("Loop", pl_module)), refresh=True)

    def on_train_end(self, *_: Any) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    def _print(self, line: str) -> None:
        if self._live:
            self._live.console.print(line, markup=False, soft_wrap=True)  # one line to copy, as in a pipe
        else:
            super()._print(line)

    def _view(self, console: Console, trainer: Trainer, module: Loop) -> Group:
        spent, total = time.monotonic() - self._start, trainer.estimated_stepping_batches
        done = trainer.global_step - self._first  # in this session
        head = Table.grid(padding=(0, 2))
        speed = f"{(module.training_log.samples - self._samples) / spent:,.0f} samples/s"
        bar = ProgressBar(total=total, completed=trainer.global_step, width=20) if total > 0 else ""
        head.add_row(self.label, self._place(trainer), bar, speed)
        left = ""
        if 0 < total < float("inf") and done:
            remaining, whole = (spent / done * steps for steps in (total - trainer.global_step, total))
            left = f"{clock(remaining)} left of this fit" + (self._rest(remaining, whole) if self._rest else "")
        return Group(head, left, self._table(trainer, module, console.height - MARGIN))

    def _table(self, trainer: Trainer, module: Loop, room: int) -> Table:
        """Return a table of each run's mean training loss in this epoch so far, and its last score."""
        tag, values = scores(trainer, module)
        visible, means = module.runs[: max(room, 1)], module.training_log.epoch_means()
        table = Table.grid(padding=(0, 2))
        table.add_row("", "train/loss", tag if values else "")
        for run in visible:
            loss = means.get(f"{run}/loss".lstrip("/"))
            words = "failed" if run in module.failed else "" if loss is None else f"{loss:.4f}"
            table.add_row(run, words, f"{values[run]:.4f}" if run in values else "")
        if len(module.runs) > len(visible):
            table.add_row(f"and {len(module.runs) - len(visible)} more")
        return table


def scores(trainer: Trainer, module: LightningModule) -> tuple[str, dict[str, float]]:
    """Return the first of `TAGS` that was logged, and its values by run.

    Values of training are means over the epoch so far, not those of the last batch.
    """
    values: dict[str, Any] = dict(trainer.callback_metrics)
    if isinstance(module, Loop):
        values |= tags(module.training_log.epoch_means(), "train")
    tag = next((tag for tag in TAGS if any(name.endswith(tag) for name in values)), TAGS[-1])
    return tag, {name.removesuffix(tag).rstrip("/"): float(v) for name, v in values.items() if name.endswith(tag)}


def losses(module: LightningModule) -> str:
    """Return each run's mean training loss in this epoch so far, as a line shows it."""
    if not isinstance(module, Loop):
        return ""
    means = module.training_log.epoch_means()
    known = {run: means[name] for run in module.runs if (name := f"{run}/loss".lstrip("/")) in means}
    return f"train/loss {_by_run(known)}" if known else ""


def _by_run(values: Mapping[str, float]) -> str:
    return "  ".join(f"{run} {value:.4f}".strip() for run, value in values.items())


def clock(seconds: float) -> str:
    """Format seconds as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


def _of(done: int, total: float) -> str:
    return f"{done}/{total}" if 0 < total < float("inf") else str(done)


class Speed(Callback):
    """Logs `train/samples_per_sec`, of training without validation, and `train/peak_memory_mib`, of rank zero.

    This is no part of the modules, whose logs are the same on any machine.
    """

    def __init__(self) -> None:
        self._step = 0  # at which it logged last

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, also in mid-epoch and after a validation."""
        self._since, self._samples = time.perf_counter(), cast("Loop", pl_module).training_log.samples

    on_train_epoch_start = on_validation_end = on_train_start

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        module, step = cast("Loop", pl_module), trainer.global_step
        if trainer.loggers and step != self._step and is_logged(module, step):
            seconds, samples = time.perf_counter() - self._since, module.training_log.samples - self._samples
            values = {"train/samples_per_sec": samples / seconds, "train/peak_memory_mib": peak_memory(module.device)}
            module.log_dict(values, batch_size=1)
            self._step = step
            self.on_train_start(trainer, module)


def peak_memory(device: torch.device) -> float:
    """Return the peak MiB of tensors on a GPU; on the CPU, the peak resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def estimate_rest(out: Path, plans: Sequence[FitPlan], current: FitPlan) -> Rest | None:
    """Estimate the rest of the run, of these fits in their order, for the display of the current one.

    An epoch to come takes as long as those of the last finished fit of its name, or as those of this one; where neither
    is known, the time is a lower bound. None where nothing follows.
    """
    records = {path: FitRecord.read(path) for plan in plans if (path := plan.record(out)).exists()}
    trained = {path: _units(record.max_epochs) for path, record in records.items()}
    measured = {path.stem: (record.fit_seconds or 0.0) / trained[path] for path, record in records.items()}
    missing = [(plan.name, _units(plan.epochs) - trained.get(plan.record(out), 0)) for plan in plans if plan != current]
    to_come = [(name, epochs) for name, epochs in missing if epochs > 0]

    def rest(left: float, whole: float) -> str:
        paces = {**measured, current.name: whole / _units(current.epochs)}
        sign = "" if all(name in paces for name, _ in to_come) else "more than "
        seconds = left + sum(paces.get(name, 0.0) * epochs for name, epochs in to_come)
        return f", {sign}{clock(seconds)} of the run"

    return rest if to_come else None


def _units(epochs: int | None) -> int:
    """Return epochs; 1 for a fit that has a number of steps, or none."""
    return max(epochs or 1, 1)
