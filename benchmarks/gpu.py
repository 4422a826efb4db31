"""Every figure that the docs have a place for on one GPU: one command of at most nine minutes, one file of tables.

    python benchmarks/gpu.py                                 # writes gpu.md
    python benchmarks/gpu.py --parts gpt attention --out FILE
    python benchmarks/gpu.py --device cpu --quick            # tiny sizes, to see that it runs: figures say nothing

kd: a step of the teacher, and of four students, by `experiments/kd.py` and by the tutorial's loops, whose images are on
    the device. The loops wait for the loss in each step, as the tutorial does.
gpt: a step of nanoGPT's net for a GPU, by `experiments/gpt.py` and bare: forward, loss, backward, clipping and fused
    AdamW on one batch.
precision: a step of a ResNet by precision, memory format and optimizer.
strategies: `experiments/hardware.py` on one device: what each strategy and the exact mode add to a plain step.
attention: kernels by `experiments/attention.py`.

A part has a process of its own and so many seconds; a row that fails has its reason in the table and costs no other.
int8 has no part: its kernels are those of processors.
"""

from harness import start

if __name__ == "__main__":
    start.script()

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.optim import Adam

from apprentice.errors import reason
from apprentice.keyed import with_seed
from benchmarks import common, gpt_speed, kd_speed
from harness.reports.report import MIB
from harness.reports.tables import NONE, Table, short
from harness.runs import environment
from harness.runs.files import write_text
from harness.runs.progress import peak_memory
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import ResNet

Figures = dict[str, float | str | None]  # a row's cells by column
Rows = Iterator[tuple[str, Callable[[], Figures]]]
BATCH, SKIPPED = 128, 10  # images; first steps, which are not counted
WHY = "why not"  # the column of reasons


class Images(common.Noise):
    """More noise: 40 batches an epoch."""

    count = 40 * BATCH


class Size(NamedTuple):
    """How much is measured, and where."""

    device: str
    quick: bool

    @property
    def trainer(self) -> list[str]:
        accelerator = "cpu" if self.device == "cpu" else "gpu"
        return ["--trainer.accelerator", accelerator, "--trainer.devices", "1"]


# Parts: names of rows, and functions that measure them


def kd(size: Size) -> Rows:
    """The bake-off of four students beside the tutorial's loops."""
    batch, count, epochs = (8, 16, 2) if size.quick else (BATCH, Images.count, 3)

    def loops() -> Figures:
        data = Images(batch, train_size=count, validation_size=0)
        data.setup()
        split: Any = data.split("train")
        images, labels = (x.to(size.device) for x in split)
        batches = list(zip(data.normalize(images).split(batch), labels.split(batch), strict=True))
        kd_speed.loops(batches, 1, torch.device(size.device))  # to warm up
        seconds, _ = kd_speed.loops(batches, epochs, torch.device(size.device))
        return of_steps(*(1e3 * seconds[name] / epochs / len(batches) for name in ("teacher", "all students")))

    def ours(*flags: str) -> Figures:
        options = ["--data", "benchmarks.gpu.Images", "--data.train_size", str(count), "--data.validation_size", "0"]
        options += ["--data.batch_size", str(batch), "--seeds", "1", "--trainer.max_epochs", str(epochs)]
        options += ["--data.test_size", str(batch), "--trainer.logger", "false", *size.trainer]
        records = common.run_clocked("kd", *options, *flags, env=ENVIRONMENT)
        teacher, students = records["LitClassifier0"], records["Distillation0"]
        steps = (1e3 * median(record["steps"][1:]) for record in (teacher, students))
        return of_steps(*steps) | {"peak, MiB": students["peak_mib"]}

    def of_steps(teacher: float, students: float) -> Figures:
        rate = batch / students * 1e3
        return {"teacher, ms a step": teacher, "four students, ms a step": students, "four students, images/s": rate}

    yield "the tutorial's loops, images on the device", loops
    yield "kd.py, teacher's outputs stored", ours
    yield "kd.py, images augmented, teacher runs", partial(ours, "--data.augment", "true")


def gpt(size: Size) -> Rows:
    """One training step."""
    layers, heads, width, block, rows, steps = (1, 6, 24, 8, 4, 22) if size.quick else (6, 6, 384, 256, 64, 80)

    def of_step(milliseconds: float, mib: float) -> Figures:
        return {"ms a step": milliseconds, "tokens/s": rows * block / milliseconds * 1e3, "peak, MiB": mib}

    def ours(*flags: str) -> Figures:
        options = [*gpt_speed.size_flags(steps, layers, heads, width, block, rows), *size.trainer]
        options += ["--trainer.limit_test_batches=1", "--trainer.logger=false"]
        record = common.run_clocked("gpt", *options, *flags, env=ENVIRONMENT)["LitLanguageModel0"]
        return of_step(1e3 * median(record["steps"][gpt_speed.SKIPPED :]), record["peak_mib"])

    def bare(half: bool, compiled: bool) -> Figures:
        device = torch.device(size.device)
        data = gpt_speed.Text(None, block, batch_size=rows)
        data.setup()
        net = gpt_speed.build_net(data, block, layers, heads, width).to(device)
        batch = data.split("train").take(torch.arange(rows) * block)
        inputs, labels = batch.inputs.to(device), batch.labels.flatten().to(device)
        forward: Any = torch.compile(net) if compiled else net

        def loss() -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
                return F.cross_entropy(forward(inputs).flatten(0, 1), labels)

        return of_step(gpt_speed.step_ms(net, loss, steps, fused=True), peak_memory(device))

    half = ["--trainer.precision", "bf16-mixed"]
    yield "gpt.py, float32", ours
    yield "gpt.py, bf16-mixed", partial(ours, *half)
    yield "gpt.py, bf16-mixed, compiled", partial(ours, *half, "--compile", "true")
    yield "bare, float32", partial(bare, False, False)
    yield "bare, bfloat16", partial(bare, True, False)
    yield "bare, bfloat16, compiled", partial(bare, True, True)


def precision(size: Size) -> Rows:
    """One net in several ways."""
    depth, rows, steps = (8, 8, 2) if size.quick else (56, 512, 40)
    warmup = 1 if size.quick else SKIPPED

    def train(precision: str, contiguous: bool = False, **options: Any) -> Figures:
        module = LitClassifier(with_seed(0, lambda: ResNet(depth)), optimizer=partial(Adam, lr=1e-3, **options))
        if contiguous:
            module.to(memory_format=torch.contiguous_format)
        settings: dict[str, Any] = {"accelerator": size.device, "devices": 1, "precision": precision}
        settings |= {"max_steps": warmup + steps, "max_epochs": -1, "limit_val_batches": 0}
        record = common.fit(module, Images(rows, validation_size=0), **settings)
        ms = 1e3 * median(record["steps"][warmup:])
        return {"ms a step": ms, "images/s": rows / ms * 1e3, "peak, MiB": record["peak_mib"]}

    yield "float32", partial(train, "32-true")
    yield "bf16-mixed", partial(train, "bf16-mixed")
    if size.device != "cpu":  # Lightning takes bfloat16 for it there
        yield "16-mixed", partial(train, "16-mixed")
    yield "bf16-mixed, not channels_last", partial(train, "bf16-mixed", contiguous=True)
    yield "bf16-mixed, fused Adam", partial(train, "bf16-mixed", fused=True)


def strategies(size: Size) -> Rows:
    """All strategies on one device."""
    flags = ["--data", "benchmarks.gpu.Images", "--steps", "2" if size.quick else "60", *size.trainer]
    flags += ["--net", "LightNN", "--data.batch_size", "8", "--data.train_size", "64"] if size.quick else []
    flags += ["--only", "ddp", "ddp-exact"] if size.quick else []
    for row in study("hardware", *flags):
        figures = {
            "ms a step": row["step_ms"], "images/s": row["images_per_second"], "over single": 1 / row["speedup"],
            "state, MiB": row["state_bytes_per_rank"][0] / MIB, "peak, MiB": row["peak_memory_per_rank"][0] / MIB,
            "largest difference (bits, if exact)": row["max_difference"],
        }  # fmt: skip
        yield row["strategy"], partial(dict, figures)


def attention(size: Size) -> Rows:
    """Kernels, forward and backward."""
    flags = ["--device", size.device, "--parts", "kernels"]
    flags += ["--quick", "true"] if size.quick else ["--dtypes", "bfloat16", "float32", "--seconds", "0.1"]
    flags += [] if size.quick else ["--lengths", "512", "2048", "8192", "16384"]
    for row in study("attention", *flags):
        figures = {WHY: row["refused"]}
        if row["refused"] is None:
            speed = row["tflops_per_second"]
            figures = {"kernel": row.get("kernel", NONE), "µs": row.get("microseconds"), "TFLOP/s": speed}
        yield row["name"], partial(dict, figures)


PARTS = {"kd": kd, "gpt": gpt, "precision": precision, "strategies": strategies, "attention": attention}
SECONDS = {"kd": 90, "gpt": 150, "precision": 70, "strategies": 110, "attention": 100}  # of a part
TITLE = "# Figures"
SPARE = 15  # seconds in which a part reads the rows of an experiment that it has stopped
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(common.ROOT), *sys.path])}  # has `benchmarks`


def study(experiment: str, *flags: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that a study measures in its part's time; RuntimeError after them if it has not ended by then."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = common.command_line(experiment, *flags, "--out", str(out))
        failure = run(command, float(os.environ["SECONDS_OF_PART"]) - SPARE, ENVIRONMENT)
        results = out / "results.json"
        yield from json.loads(results.read_text())["rows"] if results.exists() else ()
    if failure:
        raise RuntimeError(f"{experiment}.py: {failure}")


def run(command: Sequence[str], seconds: float, env: dict[str, str]) -> str:
    """Run a command in a new session, and kill it after so many seconds; return why it failed, or ""."""
    with tempfile.TemporaryFile("w+") as output:
        process = common.start_program(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks too
            process.wait()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    reasons = [line for line in lines if " failed: " in line] or lines[-1:]  # of a study's rows, or of the whole
    return f"exit code {exit_code}: {'; '.join(reasons)}" if exit_code else ""


def measure(part: str, size: Size, path: Path) -> None:
    """Write a line for each row of a part, in a process of its own."""
    with path.open("a") as file, quiet():
        for name, call in PARTS[part](size):
            try:
                figures = call()
            except Exception as error:  # noqa: BLE001 - it costs its row
                figures = {WHY: reason(error)}
            file.write(json.dumps([name, figures]) + "\n")
            file.flush()


def measure_part(part: str, args: argparse.Namespace) -> str:
    """Measure a part in a process of its own; return the section of all rows that it measures in its time."""
    seconds = SECONDS[part] * (4 if args.quick else 1)  # on a busy processor
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.touch()
        command = [sys.executable, str(Path(__file__)), "--parts", part, "--device", args.device, "--rows", str(path)]
        env = {**ENVIRONMENT, "SECONDS_OF_PART": str(seconds)}
        failure = run([*command, *(["--quick"] if args.quick else [])], seconds, env)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return section(part, rows, failure)


def section(part: str, rows: Sequence[tuple[str, Figures]], failure: str = "") -> str:
    """Format rows as a Markdown section."""
    columns = sorted(dict.fromkeys(name for _, figures in rows for name in figures), key=WHY.__eq__)  # the reasons last

    def cell(value: float | str | None) -> str:
        return value if isinstance(value, str) else short(value)

    body = [[name, *(cell(figures.get(column)) for column in columns)] for name, figures in rows]
    parts = [f"## {part}: {(PARTS[part].__doc__ or '').rstrip('.').lower()}"]
    parts += [Table(["", *columns], body).markdown()] if rows else []
    return "\n\n".join(parts + ([f"Not all was measured: {failure}"] if failure else []))


def head(args: argparse.Namespace) -> str:
    setting = environment.measurement_conditions()
    name = "a CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    lines = [f"{TITLE} of {name}", f"`{' '.join(['python', 'benchmarks/gpu.py', *args.command])}`"]
    lines += ["Sizes are tiny: these figures say nothing."] if args.quick else []
    return "\n\n".join([*lines, *(f"{key}: {value}" for key, value in setting.items())])


def main(argv: Sequence[str] | None = None) -> None:
    start.loaded()
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--quick", action="store_true", help="tiny sizes, whose figures say nothing")
    command.add_argument("--out", type=common.out_file(TITLE), default="gpu.md")
    command.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # in the process of a part: where rows go
    args = command.parse_args(argv)
    args.command = sys.argv[1:] if argv is None else list(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        command.error("--device cuda: torch sees no GPU here")
    if args.rows:
        measure(args.parts[0], Size(args.device, args.quick), args.rows)
        return
    sections: list[str] = []
    for part in args.parts:
        sections.append(measure_part(part, args))
        print(sections[-1], end="\n\n", flush=True)
        write_text(args.out, "\n\n".join([head(args), *sections]) + "\n")


if __name__ == "__main__":
    start.run(main)
