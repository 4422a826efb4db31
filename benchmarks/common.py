"""Shared parts of benchmarks: rivals that take turns, timed fits, processes, ratios with targets, a report.

Rivals of a benchmark take turns in rounds; a ratio is the median over all rounds.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from apprentice.children import end_with_parent, following
from apprentice.errors import BadInput
from datamodules import ImageData
from datamodules.splits import Split
from harness.cli.messages import one_line_errors
from harness.ranks import check_variables
from harness.reports.tables import NONE, Table, short
from harness.runs import environment
from harness.runs.files import check_output, write_json
from harness.runs.progress import peak_memory
from harness.runs.quiet import quiet
from lab.studies.isolation import run_forked
from lab.studies.meters import Stamps

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
SILENT: dict[str, Any] = {"accelerator": "cpu", "logger": False} | dict.fromkeys(
    ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
JSON_HEAD = '{\n  "benchmark"'  # how files of figures begin
T = TypeVar("T")
Runs = dict[str, list[float]]  # one value a round, by name
Rivals = dict[str, Callable[[], float]]


class Noise(ImageData):
    """Images of 3 x 32 x 32 without content, the same for training and testing."""

    count = 512
    input_shape, class_names = (3, 32, 32), tuple("0123456789")
    mean, std = (0.5,) * 3, (0.3,) * 3

    def read(self) -> tuple[Split, Split]:
        shape = self.count, *self.input_shape
        images = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return (Split(images, torch.arange(self.count) % 10),) * 2


# Measuring


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Clock(Callback):
    """Times a fit; each rank writes its record to FOLDER/<module><rank>.json.

    A record has `first`, the time of day after the first batch; `before`, the seconds until the first step; `steps`,
    the seconds of each step; `waits`, those of them that pass before the next batch; `fit`, the seconds of the whole
    fit; `losses`, pairs of a step and its `val/loss`; and the process's `threads` and `peak_mib`, on a GPU that of
    tensors. With `keep` glibc keeps freed memory in the ranks, as in the experiments.
    """

    def __init__(self, folder: str, keep: bool = True) -> None:
        self.folder, self.keep = folder, keep

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.keep:
            environment.keep_memory()
        self.stamps = Stamps(trainer.strategy.root_device)
        self.record: dict[str, Any] = {"losses": []}
        self.stamps.mark()

    def on_train_batch_start(self, *args: Any) -> None:
        self.stamps.mark()

    on_train_end: Any = on_train_batch_start

    def on_train_batch_end(self, *args: Any) -> None:
        self.stamps.mark()
        self.record.setdefault("first", time.time())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (loss := trainer.callback_metrics.get("val/loss")) is not None:
            self.record["losses"].append((trainer.global_step, loss.item()))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stamps.mark()
        before, *spans, after = self.stamps.seconds()  # a span computes, the next one waits
        self.record |= {
            "before": before, "waits": spans[1::2],
            "steps": [sum(pair) for pair in zip(spans[::2], spans[1::2], strict=True)],
            "fit": before + sum(spans) + after,
            "peak_mib": peak_memory(trainer.strategy.root_device), "threads": torch.get_num_threads(),
        }  # fmt: skip
        file = Path(self.folder) / f"{type(pl_module).__name__}{trainer.global_rank}.json"
        file.write_text(json.dumps(self.record))


def fit(
    module: LightningModule, data: Any, keep: bool = True, callbacks: Sequence[Callback] = (), **settings: Any
) -> Any:
    """Fit, on the CPU unless settings differ; return rank zero's record of a `Clock` with `keep`."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such as BatchNorm's in a pipeline
        trainer = Trainer(callbacks=[Clock(folder, keep), *callbacks], **SILENT | settings)
        trainer.fit(module, data)
        return json.loads((Path(folder) / f"{type(module).__name__}0.json").read_text())


def step_seconds(module: LightningModule, data: Any, steps: int, warmup: int = 2, **settings: Any) -> list[float]:
    """Return the seconds of each step of a fit after warm-up steps."""
    settings |= {"max_steps": warmup + steps, "max_epochs": -1, "limit_val_batches": 0}
    return fit(module, data, **settings)["steps"][warmup:]


def take_turns(rivals: Mapping[str, Callable[[], T]], rounds: int, unit: str = "") -> dict[str, list[T]]:
    """Measure each rival in each round, odd rounds in reverse order; print the values if they have a unit."""
    runs: dict[str, list[T]] = {name: [] for name in rivals}
    for number in range(rounds):
        for name, measure in [*rivals.items()][:: -1 if number % 2 else 1]:
            runs[name].append(measure())
            if unit:
                print(f"round {number + 1}: {name:24} {runs[name][-1]:10.3f} {unit}", flush=True)
    return runs


class Ratios(list[float]):
    """Ratios of two sides, round by round, so that a slow round counts little; and the sides' medians."""

    sides: tuple[float | None, float | None] = None, None


def over(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Divide one side by the other; return `Ratios`."""
    ratios = Ratios(a / b for a, b in zip(above, below, strict=True))
    ratios.sides = median(above), median(below)
    return ratios


# Processes


def run_in_ranks(world_size: int, measure: Callable[[], T]) -> list[T]:
    """Call a function in each rank of a gloo group of processes forked from this one; return its results."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(number: int) -> T:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", store, timedelta(minutes=2), world_size=world_size, rank=number)
            result = measure()
            dist.destroy_process_group()
            return result

        return run_forked(rank, world_size)


def call_fresh(function: Callable[..., T], *args: Any, env: Mapping[str, str]) -> T:
    """Call a function in a fresh interpreter and return its result; a loader in it has to fork its workers."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, env), ProcessPoolExecutor(1, spawn, end_with_parent) as processes:
        return processes.submit(function, *args).result()


def start_program(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a program that is killed when this process ends; takes the options of Popen."""
    return subprocess.Popen(command, preexec_fn=following(), **options)  # noqa: PLW1509


def run_program(
    command: Sequence[str], signum: int = signal.SIGKILL, **options: Any
) -> "subprocess.CompletedProcess[Any]":
    """Run a program that gets this signal when this process ends; takes the options of `subprocess.run`."""
    return subprocess.run(command, preexec_fn=following(signum), **options)  # noqa: PLW1510


def command_line(experiment: str, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "experiments" / f"{experiment}.py"), *flags]


def run_clocked(experiment: str, *flags: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run an experiment; return records of a `Clock`, by module and rank, in which `first` is seconds from here on."""
    with tempfile.TemporaryDirectory() as folder:
        clock = ["--trainer.callbacks", "benchmarks.common.Clock", "--trainer.callbacks.folder", folder]
        command, start = command_line(experiment, *flags, *clock, "--out", f"{folder}/out"), time.time()
        run_program(command, env=env, stdout=subprocess.DEVNULL, check=True)
        records = {file.stem: json.loads(file.read_text()) for file in Path(folder).glob("*.json")}
        return {name: record | {"first": record["first"] - start} for name, record in records.items()}


def thread_variables(count: int | None) -> dict[str, str]:
    """Return the environment variables with so many threads of OpenMP; None for the machine's default."""
    return {**os.environ, **({} if count is None else {"OMP_NUM_THREADS": str(count)})}


def one_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


# Reporting


class Target(NamedTuple):
    """The text of a ratio, its bounds, and a better value to aim at."""

    text: str
    low: float = 0.0
    high: float = float("inf")
    aim: str = ""

    def reached(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high

    def words(self, ratio: float) -> str:
        """Return the bounds, and whether the ratio misses them, as text."""
        high = f"1/{1 / self.high:g}" if self.high < 0.5 and (1 / self.high).is_integer() else f"{self.high:g}"
        bounds = [f"at least {self.low:g}"] * (self.low > 0) + [f"at most {high}"] * (high != "inf")
        return f"{', '.join(bounds)}{self.aim}{'' if self.reached(ratio) else '   MISSED'}"


class Measurement(NamedTuple):
    """The figures and ratios of a benchmark."""

    figures: dict[str, Runs]  # by unit
    ratios: Runs  # by the name of their target
    facts: Mapping[str, Any] = {}  # others, for the file


def out_file(begins: str = JSON_HEAD) -> Callable[[str], Path]:
    """Return the type of `--out`: a new file, or one that begins so, which only a benchmark writes."""

    def read(text: str) -> Path:
        try:
            check_output(Path(text), begins, "a benchmark's figures")
        except BadInput as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return Path(text)

    return read


def write_figures(out: Path, benchmark: str, values: Mapping[str, Any]) -> None:
    """Write figures as JSON, which begins with the benchmark's name."""
    write_json(out, {"benchmark": benchmark, **values})


Measure = Callable[[argparse.Namespace], Measurement]


def merge(parts: Sequence[Measurement]) -> Measurement:
    figures, ratios, facts = zip(*parts, strict=True)
    return Measurement(reduce(or_, figures), reduce(or_, ratios), reduce(or_, facts))


def medians(runs: Runs) -> dict[str, float]:
    return {name: median(values) for name, values in runs.items()}


def table(measurement: Measurement, targets: Mapping[str, Target]) -> str:
    """Format a line for each figure and each ratio: medians, and the range over all rounds."""
    rows = [
        [f"{name}, {unit}", "", short(median(runs)), f"{short(min(runs))} to {short(max(runs))}"]
        for unit, figures in measurement.figures.items()
        for name, runs in figures.items()
    ]
    for name, runs in measurement.ratios.items():
        middle, target = median(runs), targets[name]
        ratio = f"{middle:.3f}" + (f" = 1/{1 / middle:.1f}" if 0 < middle < 0.5 else "")
        rows.append([target.text, target.words(middle), ratio, f"{min(runs):.2f} to {max(runs):.2f}"])
    return Table(["", "target", "median", "all rounds"], rows, left=2).plain(200)


def row(target: Target, runs: Sequence[float]) -> list[str]:
    """Return the cells of a ratio: its text, ours, the rival, the ratio with its range over all rounds, the target."""
    sides = runs.sides if isinstance(runs, Ratios) else Ratios.sides
    middle, spread = median(runs), f"{min(runs):.2f} to {max(runs):.2f}"
    return [target.text, *map(short, sides), f"{middle:.3f} ({spread})", target.words(middle).strip() or NONE]


def parser(description: str | None, rounds: tuple[str, int], rounds_help: str) -> argparse.ArgumentParser:
    """Make a parser with `--out` and the option for the number of rounds."""
    formatter = argparse.RawDescriptionHelpFormatter
    command = argparse.ArgumentParser(description=description, formatter_class=formatter)
    command.add_argument(rounds[0], dest="rounds", type=int, default=rounds[1], help=rounds_help)
    command.add_argument("--out", type=out_file(), help="write all figures to this file, as JSON")
    return command


def run(args: argparse.Namespace, measure: Measure, targets: Mapping[str, Target], strict: bool = False) -> None:
    """Measure, print the table and write `--out`; exit with 2 for bad input, with 1 for a missed target if `strict`."""
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    header = json.loads(json.dumps(settings, default=str)) | environment.measurement_conditions()
    flags: Any = SimpleNamespace(flag_of=lambda name: name, is_flag=lambda _: False)  # a class refuses its option
    with one_line_errors(flags), quiet():
        check_variables()
        measurement = measure(args)
    header |= measurement.facts
    print(*(f"{key}: {value}" for key, value in header.items()), table(measurement, targets), sep="\n")
    if settings.get("quick"):
        print("sizes are tiny: what is missed says nothing")
    ratios = medians(measurement.ratios)
    if args.out:
        figures = {unit: medians(runs) for unit, runs in measurement.figures.items()}
        header = {**header, "figures": figures, "ratios": ratios}
        header["rows"] = [row(targets[name], runs) for name, runs in measurement.ratios.items()]
        rounds = {"figures": measurement.figures, "ratios": measurement.ratios}
        write_figures(args.out, Path(measure.__code__.co_filename).stem, header | {"all_rounds": rounds})
    if strict and not all(targets[name].reached(ratio) for name, ratio in ratios.items()):
        sys.exit(1)
