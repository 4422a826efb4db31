"""Predictions of a trained net for files of the user's: a table in CSV, and scores where labels are known."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import strategies
from apprentice.errors import BadInput, reason
from apprentice.extras import need
from datamodules.streams import check_workers
from deploy.predict.inputs import Inputs, describe_skipped, read_inputs
from deploy.predict.predictor import Guesses, InputData, Predictor
from deploy.predict.raw import DAMAGED
from deploy.predict.table import HEADS, TOP, as_csv, as_npz, as_parquet, scores
from harness import cli
from harness.runs import launch, signals
from harness.runs.facts import NetFacts
from harness.runs.files import check_output, write_bytes
from harness.runs.nets import load_net, read_facts
from harness.runs.options import OneSeedOptions
from harness.runs.progress import Lines
from harness.runs.quiet import notice, quiet
from harness.runs.session import Session
from lit_modules.nets.base import cast_inputs

LISTED = 20  # damaged inputs that are named
EMBEDDING = {"embedding", "retrieval"}  # tasks of nets that give vectors
VECTORS = {".npz": "PK\x03\x04", ".parquet": "PAR1"}  # how names of files of such end, and how they begin


@dataclass
class Options(OneSeedOptions):
    """Options of predictions."""

    run: str | None = None
    """the net's folder, such as RUN/seed0/kd."""
    inputs: str | None = None
    """a folder of images, also in folders of classes, or one image; a file of lines of text, or a folder of such files
    *.txt; or a table in CSV with a column of files or texts, and perhaps one of labels."""
    out: str | None = cli.option("predictions.csv", on_resume=cli.CALL)
    """the table that is written, in CSV; of a net that embeds a file of numpy, as embeddings.npz, with `names` (n,) and
    `embeddings` (n, D), or of Parquet, with the texts beside them."""
    top: int = cli.option(5, cli.COUNT)
    """classes of each input, the most probable first; at most all."""
    batch_size: int = cli.option(64, cli.COUNT)
    """inputs that a net sees at once; it moves last digits."""
    num_workers: int | None = None
    """processes for each device that read images ahead; by default this machine's cores over its devices."""
    overwrite: bool = cli.option(False, on_resume=cli.CALL)
    """replace that table."""
    why_one: ClassVar[str] = "nothing is drawn"
    why_inexact: ClassVar[str] = "predictions have the same bits on any number of devices anyway"
    idle: ClassVar[tuple[str, ...]] = ("seeds", "resume", "checkpoint_every", "num_classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_workers(self.num_workers, "num_workers")
        if self.out is None:
            raise BadInput("out", "null", "a file, as predictions.csv")
        if self.resume:
            raise BadInput("resume", "true", "not allowed, as predictions are made in one pass")


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
    facts, net = _load(config.run)
    embeds = facts.task in EMBEDDING
    out = _check_out(Path(config.out), Path(config.inputs), config.overwrite, embeds)
    classes = [] if embeds else _class_names(facts, net)
    inputs = read_inputs(Path(config.inputs), facts.inputs, classes)
    notice(f"predict: {config.run} on {len(inputs.names):,} inputs of {config.inputs}; writes {out}")
    if skipped := describe_skipped(inputs):
        notice(skipped)
    with signals.advise_at_stop(f"stopped; {out} is not written\n" if launch.is_main_process() else ""):
        rows = _predict(run, net, facts, inputs, None if embeds else min(max(config.top, TOP), len(classes)))
    if rows is None:
        return
    read = rows["read"]
    damaged = (read == DAMAGED).nonzero().flatten().tolist()
    out.parent.mkdir(parents=True, exist_ok=True)
    if embeds:
        write_bytes(out, (as_npz if out.suffix == ".npz" else as_parquet)(inputs, rows["outputs"], read))
    else:
        guesses = Guesses(rows["classes"], rows["probabilities"])
        table = as_csv(inputs, classes, guesses, read, min(config.top, len(classes)))
        write_bytes(out, table.encode(errors="surrogateescape"))  # names of files as the disk has them, UTF-8 or not
        if line := scores(inputs, classes, guesses, read):
            print(line)
    print(f"{len(inputs.names) - len(damaged):,} {'embeddings' if embeds else 'predictions'}: {out}")
    if damaged:
        _list_damaged(inputs, damaged)
        raise SystemExit(1)


def _load(folder: str) -> tuple[NetFacts, nn.Module]:
    """Load the net, and read what inputs it takes."""
    facts = read_facts(folder)
    if facts is None:
        expected = "a net whose net.yaml says how inputs are made; this one is of an older version"
        raise BadInput("run", folder, f"{expected}: train it again, or put task, inputs, versions and commit there")
    if facts.task not in {"classification", *EMBEDDING}:
        raise BadInput("run", folder, f"a net that classifies or embeds its inputs; its task is {facts.task}")
    net = load_net(folder)
    if getattr(net, "ranks", False):
        raise BadInput("run", folder, "a net that embeds texts, or classifies inputs; this one scores pairs of texts")
    return facts, net


def _check_out(out: Path, inputs: Path, overwrite: bool, embeds: bool) -> Path:
    """Raise BadInput if the table can't be written, or would replace anything else than another table."""
    if embeds and out.suffix not in VECTORS:
        raise BadInput("out", out, f"a file *{' or *'.join(VECTORS)}, as embeddings.npz: this net embeds its inputs")
    if embeds and out.suffix == ".parquet":
        need("datasets", "pyarrow.parquet")
    begins = VECTORS[out.suffix] if embeds else ",".join(HEADS)
    check_output(out, begins, "embeddings" if embeds else "a table of predictions")
    if out.exists() and inputs.exists() and out.samefile(inputs):
        raise BadInput("out", out, "another file than `inputs`, which it would replace")
    if out.exists() and not overwrite:
        raise BadInput("out", out, "a new file; or `overwrite true`")
    return out


@torch.no_grad()
def _class_names(facts: NetFacts, net: nn.Module) -> Sequence[str]:
    """Return the names of the net's classes, or their numbers."""
    if facts.classes:
        return facts.classes
    kind = torch.float32 if facts.inputs.kind == "images" else torch.int64
    example = cast_inputs(net, torch.zeros(1, *facts.inputs.shape, dtype=kind))
    return [str(number) for number in range(net(example).shape[1])]


def _predict(
    run: Session, net: nn.Module, facts: NetFacts, inputs: Inputs, top: int | None
) -> dict[str, torch.Tensor] | None:
    """Return by name what could be READ (n,), and what `Predictor` keeps, in the main process; nothing in others."""
    trainer = run.trainer(show=lambda _: Lines("predict"), enable_checkpointing=False)
    if not isinstance(trainer.strategy, SingleDeviceStrategy | strategies.DDP):
        raise BadInput("trainer.strategy", type(trainer.strategy).__name__, "ddp, or a single device")
    launch.join(trainer)
    data = InputData(inputs.samples(facts.inputs.shape, run.config.num_workers), run.config.batch_size)
    with tempfile.TemporaryDirectory() as folder, quiet(), _one_thread():
        path = Path(folder) / "rows.pt"
        trainer.predict(Predictor(net, facts.inputs, path, top), data, return_predictions=False)
        rows: dict[str, torch.Tensor] | None = None
        if launch.is_main_process():
            rows = torch.load(path, weights_only=True)
        return rows


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
