"""What strategies and the exact mode cost, as ratios in one run.

    python benchmarks/hardware_speed.py                               # all parts: some minutes on 2 cores
    python benchmarks/hardware_speed.py --parts ddp exact --repeat 5 --out FILE

ddp: images/s of DeepNN on 3 x 32 x 32 in batches of 128, 2 ranks of one thread against one process of one thread; and
    two processes that train on half a batch each and don't communicate, which is the machine's limit.
startup: seconds from the start of `experiments/kd.py` in a fresh interpreter until every rank has its first batch
    behind it, 8 ranks against one.
exact: a bake-off of ten epochs (DeepNN, then LightNN as ce, kd, cosine and hint from stored outputs) on real 32 x 32
    images in batches of 128, one thread a process: `--exact 8` against none, on one process and on two. The parts of
    whole runs of `experiments/kd.py` of two epochs are measured: their median steps and the storing make ten. The
    median step of the students is compared by itself too.
overhead: a step of LightNN on Digits with and without the callback of `experiments/hardware.py`.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is loaded

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Noise, Target
from benchmarks.kd_speed import ARCHIVE, bake_off, unpack
from datamodules import Digits
from lab.studies.hardware.measure import Measure, Phases
from lab.studies.isolation import run_forked
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN, LightNN
from strategies import DDP

EPOCHS = 10  # of the bake-off
STEPS = 500  # with the callback, and without
TARGETS = {
    "ddp": Target("DDP on 2 ranks over one process, images/s", low=1.9),
    "halves": Target("two halves without communication over one process, images/s"),
    "startup": Target("start-up of 8 ranks over that of one, s", high=1.5),
    "exact 1": Target("--exact 8 over plain, one process, s", high=1.6, aim=", better 1.3"),
    "exact 2": Target("--exact 8 over plain, two processes, s", high=1.3, aim=", better 1.1"),
    "students 1": Target("a step of the four students, --exact 8 over plain, one process, s", high=1.4),
    "students 2": Target("a step of the four students, --exact 8 over plain, two processes, s", high=1.2),
    "overhead": Target("a step with hardware.py's callback over one without, ms", high=1.05),
}


def ddp(args: argparse.Namespace) -> Measurement:
    def images_per_second(batch_size: int, **settings: Any) -> float:
        module, data = LitClassifier(with_seed(0, DeepNN)), Noise(batch_size, validation_size=0)
        return batch_size / median(common.step_seconds(module, data, 8, 4, **settings))

    rivals = {
        "one": lambda: run_forked(lambda _: images_per_second(128, devices=1))[0],
        "ddp": lambda: images_per_second(128, devices=2, strategy=DDP()),
        "halves": lambda: sum(run_forked(lambda _: images_per_second(64, devices=1), 2)),
    }
    runs = common.take_turns(rivals, args.rounds, "images/s")
    ratios = {name: common.over(runs[name], runs["one"]) for name in ("ddp", "halves")}
    return Measurement({"images/s (ddp)": runs}, ratios)


def startup(args: argparse.Namespace) -> Measurement:
    """Measure seconds from the command to the first batch of 1 rank and of 8."""
    flags = ["--seeds", "1", "--teacher", "LightNN", "--only", "ce", "--trainer.max_epochs", "1"]

    def seconds(devices: int) -> float:
        records = common.run_clocked("kd", *flags, "--trainer.logger", "false", "--trainer.devices", str(devices))
        firsts = [record["first"] for name, record in records.items() if name.startswith("LitClassifier")]
        assert len(firsts) == devices
        return max(firsts)

    runs = common.take_turns({f"{n} ranks": partial(seconds, n) for n in (1, 8)}, args.rounds, "s")
    return Measurement({"s (startup)": runs}, {"startup": common.over(runs["8 ranks"], runs["1 ranks"])})


def exact(args: argparse.Namespace) -> Measurement:
    def parts(folder: str, devices: int, *flags: str) -> dict[str, float]:
        flags = ("--seeds", "1", "--trainer.logger", "false", "--trainer.devices", str(devices), *flags)
        teacher, students = bake_off(folder, args.images, 2, *flags)
        steps = {"teacher step": median(teacher["steps"]), "students step": median(students["steps"])}
        whole = EPOCHS * len(teacher["steps"]) / 2 * sum(steps.values()) + students["before"]
        return {**steps, "storing": students["before"], "bake-off": whole}

    with unpack(args) as folder:
        kinds = [(name, n, flags) for n in (1, 2) for name, flags in (("plain", []), ("exact", ["--exact", "8"]))]
        rivals = {f"{name} {n}": partial(parts, folder, n, *flags) for name, n, flags in kinds}
        rounds = common.take_turns(rivals, args.rounds)
    runs = {f"{name}, {key}": [seconds[key] for seconds in rounds[name]] for name in rivals for key in rounds[name][0]}
    ratios = {
        f"{key} {n}": common.over(runs[f"exact {n}, {part}"], runs[f"plain {n}, {part}"])
        for key, part in (("exact", "bake-off"), ("students", "students step"))
        for n in (1, 2)
    }
    return Measurement({"s (exact)": runs}, ratios)


def overhead(args: argparse.Namespace) -> Measurement:
    def step_ms(with_callback: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            measure = Measure(Path(folder), Phases(warmup=0, block=1, blocks=10**9, profiled=1))
            callbacks: Any = {"callbacks": [measure] if with_callback else []}
            module = LitClassifier(with_seed(0, partial(LightNN, (1, 8, 8))))
            return 1e3 * median(common.step_seconds(module, Digits(validation_size=0), STEPS, **callbacks))

    runs = common.take_turns({"with": partial(step_ms, True), "without": partial(step_ms, False)}, args.rounds)
    return Measurement({"ms a step (overhead)": runs}, {"overhead": common.over(runs["with"], runs["without"])})


PARTS = {"ddp": ddp, "startup": startup, "exact": exact, "overhead": overhead}


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    return common.merge([PARTS[name](args) for name in args.parts])


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 3), "rounds, in which rivals take turns")
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--data", type=Path, default=ARCHIVE, help="for exact: a folder of images, or an archive")
    command.add_argument("--images", type=int, default=512, help="for exact: so many")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
