"""How long experiments take to begin: to refuse a wrong flag, and to their first step, over `import lightning.pytorch`.

    python benchmarks/start_speed.py                 # some minutes
    python benchmarks/start_speed.py --repeat 1 --only kd

Each starts in a fresh interpreter, with the bytecode that an earlier start has written. The first step of kd.py and
gpt.py is their first batch; of the others, their first line after the one that says where they write.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial

from benchmarks import common
from benchmarks.common import ROOT, Found, Target

EXPERIMENTS = sorted(file.stem for file in (ROOT / "experiments").glob("*.py"))
FITS = {"kd": ["--only", "ce", "--trainer.max_epochs", "1"], "gpt": ["--trainer.max_steps", "2"]}
STUDIES = ("attention", "comm", "hardware", "pipeline")
IMPORT = "import lightning.pytorch"
TARGETS = {
    **{f"{name}, refusal": Target(f"{name}.py refuses a wrong flag, over `{IMPORT}`") for name in EXPERIMENTS},
    **{f"{name}, step": Target(f"{name}.py's first step, over `{IMPORT}`") for name in (*FITS, *STUDIES)},
}


def importing() -> float:
    """Seconds of the import alone."""
    return common.seconds(partial(subprocess.run, [sys.executable, "-c", IMPORT], check=True))


def refusal(name: str) -> float:
    """Seconds until a wrong flag is refused."""
    command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), "--nosuch", "1"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return time.perf_counter() - start


def first_batch(name: str) -> float:
    """Seconds until a fit has its first batch behind it."""
    start = time.time()
    found = common.clocked(name, *FITS[name], "--trainer.logger", "false")
    return min(each["first"] for each in found.values()) - start


def first_line(name: str) -> float:
    """Seconds until a study measures, or has measured first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), "--out", f"{folder}/out"]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            announced = process.stdout.readline(), process.stdout.readline()
            found = time.perf_counter() - start
            process.terminate()
        assert all(announced), f"{name}: expected two lines"
    return found


def measure(args: argparse.Namespace) -> Found:
    """All starts, in turn."""
    rivals = {"import": importing}
    rivals |= {f"{name}, refusal": partial(refusal, name) for name in args.only}
    rivals |= {f"{name}, step": partial(first_batch, name) for name in args.only if name in FITS}
    rivals |= {f"{name}, step": partial(first_line, name) for name in args.only if name in STUDIES}
    runs = common.take_turns(rivals, args.rounds, "s")
    return Found({"s": runs}, {name: common.over(runs[name], runs["import"]) for name in runs if name != "import"})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    command = common.parser(__doc__, ("--repeat", 3), "rounds in which all take turns")
    command.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, help="of the experiments")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
