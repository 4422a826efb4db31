"""Predictions of a trained net for files of the user's: a table in CSV, and scores where labels are known."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import strategies
from apprentice.errors import BadInput, reason
from datamodules.raw import DAMAGED
from harness import cli
from harness.runs import launch
from harness.runs.facts import NetFacts
from harness.runs.files import can_be_written, write_bytes
from harness.runs.nets import load_net, read_facts, teachers_beside
from harness.runs.progress import Lines
from harness.runs.quiet import notice, quiet
from harness.runs.session import Session
from harness.studies.predict.inputs import Inputs, describe_skipped, read_inputs
from harness.studies.predict.predictor import Guesses, InputData, Predictor
from harness.studies.predict.table import TOP, as_csv, scores
from lit_modules.nets import Ensemble, cast_inputs

LISTED = 20  # damaged inputs that are named
STUDENT, TEACHER = "student", "teacher"


@dataclass
class Options(cli.OneSeedOptions):
    """Options of predictions.

    Args:
        run: the net's folder, such as RUN/seed0/kd.
        inputs: a folder of images, also in folders of classes, or one image; a file of lines of text, or a folder of
            such files *.txt; or a table in CSV with a column of files or texts, and perhaps one of labels.
        out: the table that is written, in CSV.
        overwrite: replace that table.
        top: classes of each input, the most probable first; at most all.
        batch_size: inputs that a net sees at once; it moves last digits.
        num_workers: processes for each device that read images ahead; by default this machine's cores over its devices.
        teacher: predict by the teacher beside it too, and say where both agree.
        exact: none; predictions are the same to the bit on any number of devices.
    """

    run: str | None = None
    inputs: str | None = None
    out: str | None = field(default="predictions.csv", metadata=cli.CALL.metadata)
    top: int = 5
    batch_size: int = 64
    num_workers: int | None = None
    teacher: bool = False
    why_one: ClassVar[str] = "nothing is drawn"
    why_inexact: ClassVar[str] = "predictions have the same bits on any number of devices anyway"
    idle: ClassVar[tuple[str, ...]] = ("seeds", "resume", "checkpoint_every", "num_classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("top", "batch_size"):
            if vars(self)[name] < 1:
                raise BadInput(name, vars(self)[name], "a whole number, at least 1")
        if self.num_workers is not None and self.num_workers < 0:
            raise BadInput("num_workers", self.num_workers, "a number of processes: 0, 1, 2, …")
        if self.resume:
            raise BadInput("resume", "true", "it left out: predictions are made in one pass")


def predict(run: Session) -> None:
    """Predict what the command line describes; write the table, print scores and what could not be read.

    Raises:
        BadInput: there is no such net or input, or the table is there already.
        SystemExit: with code 1 if an input could not be read.
    """
    config = run.config
    for flag, expected in (("run", "a net's folder, as RUN/seed0/kd"), ("inputs", "a folder of images or texts")):
        if not vars(config)[flag]:
            raise BadInput(flag, "(nothing)", expected)
    facts, nets = _load(config.run, config.teacher)
    out = _check_out(Path(config.out), config.overwrite)
    classes = _class_names(facts, nets[STUDENT])
    inputs = read_inputs(Path(config.inputs), facts.inputs, classes)
    notice(f"predict: {config.run} on {len(inputs.names):,} inputs of {config.inputs}; writes {out}")
    if skipped := describe_skipped(inputs):
        notice(skipped)
    read, guesses = _guess(run, nets, facts, inputs, out, min(max(config.top, TOP), len(classes)))
    if not launch.is_main_process():
        return
    damaged = (read == DAMAGED).nonzero().flatten().tolist()
    rows = as_csv(inputs, classes, guesses, read, min(config.top, len(classes)))
    write_bytes(out, rows.encode(errors="surrogateescape"))  # names of files as the disk has them, UTF-8 or not
    for line in scores(inputs, classes, guesses, read):
        print(line)
    print(f"{len(inputs.names) - len(damaged):,} predictions: {out}")
    if damaged:
        _list_damaged(inputs, damaged)
        raise SystemExit(1)


def _load(folder: str, with_teacher: bool) -> tuple[NetFacts, dict[str, nn.Module]]:
    """Load the net, and the teacher beside it, and read what inputs they take."""
    facts = read_facts(folder)
    if facts is None:
        expected = "a net whose net.yaml says how inputs are made; this one is of an older version"
        raise BadInput("run", folder, f"{expected}: train it again, or put task, inputs, versions and commit there")
    if facts.task != "classification":
        raise BadInput("run", folder, f"a net that classifies its inputs; its task is {facts.task}")
    nets = {STUDENT: load_net(folder)}
    if with_teacher:
        shares = teachers_beside(folder)
        for beside in shares:
            theirs = read_facts(beside, "teacher")
            if theirs is None or (theirs.inputs, theirs.classes) != (facts.inputs, facts.classes):
                raise BadInput("teacher", beside, f"a net of the same inputs and classes as {folder}")
        loaded = [load_net(beside, "teacher") for beside in shares]
        nets[TEACHER] = Ensemble(loaded, [*shares.values()]) if len(loaded) > 1 else loaded[0]
    return facts, nets


def _check_out(out: Path, overwrite: bool) -> Path:
    """Raise BadInput if the table can't be written, or is there and not to be replaced."""
    if out.is_dir():
        raise BadInput("out", out, "a file, as predictions.csv; this is a folder")
    if out.exists() and not overwrite:
        raise BadInput("out", out, "a new file; or --overwrite true")
    if not can_be_written(out.parent):
        raise BadInput("out", out, "a file in a folder that can be written")
    return out


@torch.no_grad()
def _class_names(facts: NetFacts, net: nn.Module) -> Sequence[str]:
    """Return the names of the net's classes, or their numbers."""
    if facts.classes:
        return facts.classes
    kind = torch.float32 if facts.inputs.kind == "images" else torch.int64
    example = cast_inputs(net, torch.zeros(1, *facts.inputs.shape, dtype=kind))
    return [str(number) for number in range(net(example).shape[1])]


def _guess(
    run: Session, nets: dict[str, nn.Module], facts: NetFacts, inputs: Inputs, out: Path, top: int
) -> tuple[torch.Tensor, dict[str, Guesses]]:
    """Return what could be READ (n,), and each net's guesses, in the main process; nothing in others."""
    trainer = run.trainer(show=lambda _: Lines("predict"), enable_checkpointing=False)
    if not isinstance(trainer.strategy, SingleDeviceStrategy | strategies.DDP):
        raise BadInput("trainer.strategy", type(trainer.strategy).__name__, "ddp, or a single device")
    launch.join(trainer)
    path = out.with_name(f".{out.name}.rows")
    if launch.is_main_process():
        out.parent.mkdir(parents=True, exist_ok=True)
    module = Predictor(nets, facts.inputs, path, top)
    data = InputData(inputs.samples(facts.inputs.shape, run.config.num_workers), run.config.batch_size)
    try:
        with quiet(), _one_thread():
            trainer.predict(module, data, return_predictions=False)
        if not launch.is_main_process():
            return torch.empty(0), {}
        rows: dict[str, Any] = torch.load(path, weights_only=True)
        return rows["read"], {name: Guesses(*values) for name, values in rows["guesses"].items()}
    finally:
        if launch.is_main_process():
            path.unlink(missing_ok=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks that are forked do: the number of threads changes a kernel's bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _list_damaged(inputs: Inputs, damaged: Sequence[int]) -> None:
    """Name on stderr the inputs that could not be read, and say why."""
    sys.stderr.write(f"{len(damaged):,} of {len(inputs.names):,} inputs can't be read; their lines are empty:\n")
    for place in damaged[:LISTED]:
        why = "it can't be read"
        try:
            if inputs.images is not None:
                inputs.images.decode(place)
        except BadInput as fault:
            why = reason(ValueError(fault.expected))
        sys.stderr.write(f"  {inputs.names[place]}: expected {why}\n")
    if more := len(damaged) - LISTED:
        sys.stderr.write(f"  and {more:,} more\n" if more > 0 else "")
