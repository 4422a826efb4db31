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
from benchmarks.common import ROOT, Measurement, Target

EXPERIMENTS = sorted(file.stem for file in (ROOT / "experiments").glob("*.py"))
FITS = {"kd": ["--only", "ce", "--trainer.max_epochs", "1"], "gpt": ["--trainer.max_steps", "2"]}
STUDIES = ("attention", "comm", "hardware", "pipeline")
IMPORT = "import lightning.pytorch"
TARGETS = {
    **{f"{name}, refusal": Target(f"{name}.py refuses a wrong flag, over `{IMPORT}`") for name in EXPERIMENTS},
    **{f"{name}, step": Target(f"{name}.py's first step, over `{IMPORT}`") for name in (*FITS, *STUDIES)},
}


def import_seconds() -> float:
    return common.seconds(partial(subprocess.run, [sys.executable, "-c", IMPORT], check=True))


def refusal_seconds(name: str) -> float:
    start = time.perf_counter()
    process = subprocess.run(common.command_line(name, "--nosuch", "1"), capture_output=True, text=True, check=False)
    assert process.returncode == 2, process.stderr
    return time.perf_counter() - start


def first_batch_seconds(name: str) -> float:
    """Return the seconds until a fit has finished its first batch."""
    records = common.run_clocked(name, *FITS[name], "--trainer.logger", "false")
    return min(record["first"] for record in records.values())


def first_line_seconds(name: str) -> float:
    """Return the seconds until a study prints its second line."""
    with tempfile.TemporaryDirectory() as folder:
        command = common.command_line(name, "--out", f"{folder}/out")
        start = time.perf_counter()
        with common.start_program(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            lines = process.stdout.readline(), process.stdout.readline()
            seconds = time.perf_counter() - start
            process.terminate()
        assert all(lines), f"{name}: expected two lines"
    return seconds


def measure(args: argparse.Namespace) -> Measurement:
    rivals = {"import": import_seconds}
    rivals |= {f"{name}, refusal": partial(refusal_seconds, name) for name in args.only}
    rivals |= {f"{name}, step": partial(first_batch_seconds, name) for name in args.only if name in FITS}
    rivals |= {f"{name}, step": partial(first_line_seconds, name) for name in args.only if name in STUDIES}
    runs = common.take_turns(rivals, args.rounds, "s")
    return Measurement({"s": runs}, {name: common.over(runs[name], runs["import"]) for name in rivals if "," in name})


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 3), "rounds in which all take turns")
    command.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, help="of the experiments")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
