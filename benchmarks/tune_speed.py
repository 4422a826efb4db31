"""A search of settings in one pass beside each setting by itself.

    python benchmarks/tune_speed.py                   # ResNet-56 teaches ResNet-8, 32 x 32 images: minutes
    python benchmarks/tune_speed.py --repeat 1 --settings 2 --teacher 8 --out FILE

`together` is what the search of `kd.py --tune` takes on one tuning seed, `alone` the sum over kd.py's fits of each of
its settings for as many epochs as it had there. Teachers' training, start-up and tests are in neither. With T the
teacher's forward of a batch, single fits ask it for every setting, and a search once for all: without what that saves,
`alone` is the least that it can take. The teacher runs every batch in all fits, as where images are augmented.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import common
from benchmarks.common import Measurement, Target
from benchmarks.zoo_speed import forward, measure_forked

SEED = 10_000  # of the search
TARGETS = {
    "together / alone": Target("the search over each of its settings by itself"),
    "least / alone": Target("the least that this can be: the teacher once for all"),
    "together / least": Target("the search over the least", high=1.2),
}


def experiment(args: argparse.Namespace, out: Path, *flags: str) -> Path:
    """Run kd.py on noise; return its folder."""
    sizes = ["--data.batch_size", str(args.batch_size), "--teacher.depth", str(args.teacher), "--student.depth", "8"]
    nets = ["--data", "benchmarks.common.Noise", "--teacher", "ResNet", "--student", "ResNet", *sizes]
    options = ["--teacher_cache_mb", "0", "--trainer.logger", "false", "--out", str(out), *flags]
    command = common.command_line("kd", *nets, *options)
    process = common.run_program(command, env=common.thread_variables(1), capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(process.stderr)
    return out


def measure_round(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measure seconds of the search and of its settings, and the batches that needed no forward of the teacher."""
    search = ["--tune", str(args.settings), "--tune_seeds", "1", "--only", *args.only, "--seeds", "1"]
    run = experiment(args, folder / "run", *search, "--trainer.max_epochs", str(args.epochs))
    results = json.loads((run / "results.json").read_text())
    tuning, cost = results["tuning"], results["tuning_cost"]
    teacher = run / "tuning" / f"seed{SEED}" / "teacher" / "weights.pt"
    alone = 0.0
    for method, entry in tuning.items():
        for number, setting in enumerate(entry["settings"]):
            options = setting["options"].items()
            flags = [f"--{name if '.' in name else f'variants.{method}.{name}'}={value}" for name, value in options]
            flags += ["--trainer.max_epochs", str(setting["epochs"])]
            flags += ["--only", method, "--seeds", f"[{SEED}]", "--teacher_ckpt", str(teacher)]
            fit = experiment(args, folder / f"{method}{number}", *flags) / f"seed{SEED}" / "students.json"
            alone += json.loads(fit.read_text())["fit_seconds"]
    saved = (cost["teacher_samples_alone"] - cost["teacher_samples"]) / args.batch_size
    return {"together": cost["fit_seconds"], "alone": alone, "saved": saved}


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure_round(args, Path(folder))
        rounds.append(seconds | {"teacher": measure_forked(partial(forward, args))[0]})
        print(*(f"{name} {value:.3f}" for name, value in rounds[-1].items()), flush=True)
    together, alone, saved, teacher = ([figures[name] for figures in rounds] for name in rounds[0])
    least = [a - s * t for a, s, t in zip(alone, saved, teacher, strict=True)]
    ratios = {
        "together / alone": common.over(together, alone), "least / alone": common.over(least, alone),
        "together / least": common.over(together, least),
    }  # fmt: skip
    figures = {"s": {"together": together, "alone": alone, "teacher's forward": teacher}}
    return Measurement(figures, ratios, {"batches for which the teacher was not asked again": median(saved)})


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, ("--repeat", 2), "rounds")
    parser.add_argument("--settings", type=int, default=4, help="of each method")
    parser.add_argument("--only", nargs="+", default=["ce", "kd", "hint"], help="names of methods")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--teacher", type=int, default=56, help="depth of the teacher, a ResNet")
    parser.add_argument("--steps", type=int, default=10, help="timed forwards of the teacher")
    common.run(parser.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
