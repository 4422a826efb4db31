"""What strategies and the exact mode cost, as ratios in one run.

    python benchmarks/hardware_speed.py                               # all parts: some minutes on 2 cores
    python benchmarks/hardware_speed.py --parts ddp exact --repeat 5 --out FILE

ddp: images/s of DeepNN on 3 x 32 x 32 in batches of 128, 2 ranks of one thread against one process of one thread; and
    two processes that train on half a batch each and don't talk, which is the machine's limit.
startup: seconds from the start of `experiments/kd.py` in a fresh interpreter until every rank has its first batch
    behind it, 8 ranks against one.
exact: a bake-off of ten epochs (DeepNN, then LightNN as ce, kd, cosine and hint from stored outputs) on real 32 x 32
    images in batches of 128, one thread a process: `--exact 8` against none, on one process and on two. Measured are
    whole runs of `experiments/kd.py` of two epochs; their median steps and the storing make ten.
overhead: a step of LightNN on Digits with and without the callback of `experiments/hardware.py`, in turns of 25 steps
    in one fit.

Each figure is a median over `--repeat` runs, in which rivals take turns.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing.spawn import start_processes

import strategies
from apprentice.keyed import with_seed
from benchmarks.kd_speed import ARCHIVE, chosen_images
from datamodules import Digits, ImageData
from datamodules.splits import Split
from harness.runs import environment
from harness.runs.progress import quiet
from harness.studies.hardware import Bench, Cases
from harness.studies.hardware.callbacks import Measure, Phases
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN, LightNN

KD = Path(__file__).resolve().parents[1] / "experiments" / "kd.py"
EPOCHS = 10  # of the bake-off
STEPS = 2000  # in which the callback's overhead is measured
Figures = dict[str, float]


class Noise(ImageData):
    """512 images of 3 x 32 x 32 that show nothing: a step takes as long as on real ones."""

    input_shape, class_names = (3, 32, 32), tuple("0123456789")
    mean, std = (0.5,) * 3, (0.3,) * 3

    def read(self) -> tuple[Split, Split]:
        """The same for training and testing."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (512, 3, 32, 32), dtype=torch.uint8, generator=generator)
        whole = Split(images, torch.arange(512) % 10)
        return whole, whole


# Two ranks against one process


def ddp(args: argparse.Namespace) -> dict[str, Any]:
    """Images/s of one process, of DDP and of two halves."""
    from experiments import hardware

    rows = Cases(hardware.parser().parse(["--trainer.devices", "2"]).trainer, None)
    whole, half = _bench(128), _bench(64)
    runs: dict[str, list[float]] = {"one": [], "ddp": [], "halves": []}
    for _ in range(args.repeat):
        runs["one"].append(whole.figures(rows.single)["images_per_second"])
        runs["ddp"].append(whole.figures(rows.known["ddp"])["images_per_second"])
        runs["halves"].append(_together(lambda: half.figures(rows.single)["images_per_second"]))
    found = {name: median(values) for name, values in runs.items()}
    ratios = {"ddp": found["ddp"] / found["one"], "halves": found["halves"] / found["one"]}
    return {"images_per_second": found, "ratios": ratios, "runs": runs}


def _bench(batch_size: int) -> Bench:
    data = Noise(batch_size, validation_size=0)
    data.setup()
    return Bench(lambda _: LitClassifier(with_seed(0, DeepNN)), data, steps=6)


def _together(measure: Callable[[], float]) -> float:
    """The sum of what two processes find at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_one_of_them, args=(measure, folder), nprocs=2, start_method="fork")
        return sum(float(file.read_text()) for file in Path(folder).iterdir())


def _one_of_them(number: int, measure: Callable[[], float], folder: str) -> None:
    (Path(folder) / str(number)).write_text(str(measure()))


# From the command to the first batch


class FirstBatch(Callback):
    """Writes when a rank has its first batch behind it.

    Args:
        folder: where.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Write the time, once."""
        file = Path(self.folder) / f"rank{trainer.global_rank}"
        if not file.exists():
            file.write_text(str(time.time()))


def startup(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of 1 rank and of 8."""
    runs: dict[str, list[float]] = {"1": [], "8": []}
    for _ in range(args.repeat):
        for devices, seconds in runs.items():
            seconds.append(_seconds_to_first_batch(devices))
    found = {f"{devices} ranks": median(seconds) for devices, seconds in runs.items()}
    return {"seconds": found, "ratios": {"startup": found["8 ranks"] / found["1 ranks"]}, "runs": runs}


def _seconds_to_first_batch(devices: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        small = ["--teacher", "LightNN", "--only", "ce", "--trainer.max_epochs", "1"]
        _kd(folder, FirstBatch, "--trainer.devices", devices, *small)
        stamps = [float(file.read_text()) for file in Path(folder).glob("rank*")]
    assert len(stamps) == int(devices)
    return max(stamps) - start


def _kd(folder: str, callback: type[Callback], *flags: str) -> None:
    """Run the bake-off with a callback that writes to the folder."""
    watched = ["--trainer.callbacks", f"benchmarks.hardware_speed.{callback.__name__}"]
    watched += ["--trainer.callbacks.folder", folder, "--out", f"{folder}/out"]
    command = [sys.executable, str(KD), "--seeds", "1", "--trainer.logger", "false", *flags, *watched]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# The exact mode


class StepTimes(Callback):
    """Writes the seconds of each step of a fit, and those before the first.

    Args:
        folder: where.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._moments: list[float] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._moments = [time.perf_counter()]

    def on_train_batch_start(self, *args: Any) -> None:
        """A step begins here, and the one before ends."""
        self._moments.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them down."""
        before, *steps = (second - first for first, second in pairwise(self._moments))
        if trainer.is_global_zero:
            file = Path(self.folder) / f"{type(pl_module).__name__}.json"
            file.write_text(json.dumps({"before": before, "steps": steps}))


def exact(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a bake-off, plain and exact, on one process and on two."""
    kinds = {f"{name} {n}": (n, flags) for n in (1, 2) for name, flags in (("plain", []), ("exact", ["--exact", "8"]))}
    runs: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    with chosen_images(args.data, args.images) as images:
        for _ in range(args.repeat):
            for kind, (devices, flags) in kinds.items():
                runs[kind].append(_bake_off(images, devices, flags))
    found = {kind: {key: median(run[key] for run in runs[kind]) for key in runs[kind][0]} for kind in kinds}
    ratios = {f"exact {n}": found[f"exact {n}"]["bake-off"] / found[f"plain {n}"]["bake-off"] for n in (1, 2)}
    return {"seconds": found, "ratios": ratios, "runs": runs}


def _bake_off(images: Path, devices: int, flags: Sequence[str]) -> Figures:
    data = ["--data", "ImageFolder", "--data.root", str(images), "--data.validation_size", "0"]
    with tempfile.TemporaryDirectory() as folder:
        _kd(folder, StepTimes, *data, "--trainer.devices", str(devices), "--trainer.max_epochs", "2", *flags)
        teacher, students = (
            json.loads((Path(folder) / f"{name}.json").read_text()) for name in ("LitClassifier", "Distillation")
        )
    steps = (len(teacher["steps"]) + 1) // 2
    found = {"teacher step": median(teacher["steps"]), "students step": median(students["steps"])}
    whole = EPOCHS * steps * (found["teacher step"] + found["students step"]) + students["before"]
    return {**found, "storing": students["before"], "bake-off": whole}


# hardware.py's own overhead


class InTurns(Callback):
    """Calls another callback's hooks in every other turn of some steps, and times the steps of both kinds.

    Args:
        other: the callback.
        turn: steps of a turn.
    """

    def __init__(self, other: Measure, turn: int = 25) -> None:
        self.other, self.turn, self.step = other, turn, 0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._start = 0.0

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Hand on."""
        self.other.setup(*args, **kwargs)

    @property
    def _on(self) -> bool:
        return self.step // self.turn % 2 == 1

    def on_train_batch_start(self, *args: Any) -> None:
        """End a step and begin the next."""
        now = time.perf_counter()
        if self.step % self.turn:
            self.seconds[self._on].append(now - self._start)
        self._start = now
        self.step += 1
        if self._on:
            self.other.on_train_batch_start(*args)

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Hand on."""
        if self._on:
            self.other.on_before_optimizer_step(*args)


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step with and without the callback."""
    data = Digits(validation_size=0)
    data.setup()
    runs: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as folder:
            watch = InTurns(Measure(Path(folder), Phases(warmup=0, block=1, blocks=10**9, profiled=1)))
            net = with_seed(0, partial(LightNN, (1, 8, 8)))
            trainer = Trainer(
                accelerator="cpu", max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=[watch],
            )  # fmt: skip
            trainer.fit(LitClassifier(net), data)
        runs["with"].append(1e3 * median(watch.seconds[True]))
        runs["without"].append(1e3 * median(watch.seconds[False]))
    found = {name: median(values) for name, values in runs.items()}
    return {"step_ms": found, "ratios": {"overhead": found["with"] / found["without"]}, "runs": runs}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "ddp": ddp, "startup": startup, "exact": exact, "overhead": overhead,
}  # fmt: skip
# What is compared, and the figure it is to reach; none for what is only told.
LINES = {
    "ddp": ("DDP on 2 ranks over one process, images/s", "at least 1.7"),
    "halves": ("two halves without communication over one process, images/s", ""),
    "startup": ("start-up of 8 ranks over that of one, s", "at most 1.5"),
    "exact 1": ("--exact 8 over plain, one process, s", "at most 1.6, better 1.3"),
    "exact 2": ("--exact 8 over plain, two processes, s", "at most 1.3, better 1.1"),
    "overhead": ("a step with hardware.py's callback over one without, ms", "below 1.05"),
}


def table(parts: dict[str, Any]) -> str:
    """A line a ratio."""
    ratios = {name: ratio for part in parts.values() for name, ratio in part["ratios"].items()}
    lines = [f"{LINES[name][0]:64}{ratio:7.3f}   {LINES[name][1]}".rstrip() for name, ratio in ratios.items()]
    return "\n".join([f"{'':64}{'ratio':>7}   target", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each rival")
    parser.add_argument("--data", type=Path, default=ARCHIVE, help="for exact: an archive, or train/<class>/*.jpg")
    parser.add_argument("--images", type=int, default=512, help="for exact: so many")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    args = parser.parse_args(argv)
    strategies.register()
    environment.keep_memory()
    torch.set_num_threads(1)
    header = {"repeat": args.repeat, **environment.setting()}
    parts = {}
    with quiet():
        for name in args.parts:
            parts[name] = PARTS[name](args)
            print(
                f"{name}: {json.dumps({key: value for key, value in parts[name].items() if key != 'runs'})}", flush=True
            )
    print(*(f"{key}: {value}" for key, value in header.items()), table(parts), sep="\n")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "hardware_speed", **header, "parts": parts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
