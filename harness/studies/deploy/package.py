"""A trained net as a folder that runs without this project: files of the net, how to use them, and a model card."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from apprentice import extras, keyed
from apprentice.errors import BadInput
from harness.runs.facts import KEYS, NetFacts
from harness.runs.files import can_be_written, write_text
from harness.runs.nets import load_net, read_facts, read_spec, write_spec
from harness.runs.quiet import notice
from harness.studies.deploy import formats
from harness.studies.deploy.card import model_card

LABELS, USE, CARD = "labels.txt", "use.py", "README.md"
FILES = (formats.ONNX, formats.PROGRAM, formats.WEIGHTS, "net.yaml", LABELS, USE, CARD)
TEMPLATES = Path(__file__).parent / "use"
TRIED = 64  # random inputs by which files are compared with the net


def check_package(out: Path, flag: str, overwrite: bool) -> None:
    """Raise BadInput if a folder can't be written, or holds other files; Missing if a library is not installed."""
    extras.need(*formats.EXTRA)
    if not can_be_written(out):
        raise BadInput(flag, out, "a folder that can be written")
    if out.is_dir() and (files := sorted(path.name for path in out.iterdir())):
        strangers = [name for name in files if name not in FILES]
        if strangers or not overwrite:
            advice = "a new folder" if strangers else "a new folder; or --overwrite true"
            raise BadInput(flag, out, f"{advice}; this one holds {(strangers or files)[0]}")


def export_net(folder: Path, out: Path) -> dict[str, str]:
    """Export the net of a run's folder, RUN/seed<k>/<name>, in float32; return what failed, by file.

    Each file is read in a fresh process, which answers for random inputs, and compared with the net.

    Raises:
        BadInput: there is no net in the folder, or it is of a version that did not say what inputs it takes.
    """
    facts = read_facts(folder)
    if facts is None:
        raise BadInput("run", folder, f"a net whose net.yaml says its {', '.join(KEYS[1:])}; train it again")
    net = load_net(folder).float()
    inputs, count = example_of(net, facts)
    facts = facts if facts.classes else replace(facts, classes=tuple(map(str, range(count))))
    out.mkdir(parents=True, exist_ok=True)
    write_spec(read_spec(folder), out, facts)
    writers: dict[str, Callable[[], None]] = {
        formats.ONNX: lambda: formats.write_onnx(net, inputs, out, facts),
        formats.PROGRAM: lambda: formats.write_program(net, inputs, out, facts),
        formats.WEIGHTS: lambda: formats.write_weights(net, out, facts),
    }
    failed: dict[str, str] = {}
    for file, write in writers.items():
        (out / file).unlink(missing_ok=True)
        notice(f"writing {out / file}")
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever an exporter makes of a net that it can't write
            failed[file] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    written = [out / file for file in writers if file not in failed]
    failed |= _compare(net, inputs, written)
    for file in failed:
        (out / file).unlink(missing_ok=True)
    write_text(out / LABELS, "".join(f"{name}\n" for name in facts.classes))
    write_text(out / USE, (TEMPLATES / f"{facts.inputs.kind}.py.txt").read_text("utf-8"))
    write_text(out / CARD, model_card(folder, facts, sum(p.numel() for p in net.parameters())))
    return failed


@torch.no_grad()
def example_of(net: nn.Module, facts: NetFacts) -> tuple[Tensor, int]:
    """Return random inputs (TRIED, ...) of a net, the same in each call, and the number of its logits."""
    shape, has_tokens = facts.inputs.shape, facts.inputs.kind == "bytes" or facts.task == "tokens"
    zeros = torch.zeros(1, *shape, dtype=torch.int64 if has_tokens else torch.float32)
    count = net(zeros).shape[-1]
    most = count if facts.task == "tokens" else 256
    make = (lambda: torch.randint(most, (TRIED, *shape))) if has_tokens else (lambda: torch.randn(TRIED, *shape))
    return keyed.with_seed(0, make), count


@torch.no_grad()
def _compare(net: nn.Module, inputs: Tensor, files: Sequence[Path]) -> dict[str, str]:
    """Say of each file whose answers are others than the net's what is wrong."""
    notice("reading each file again in a fresh process")
    logits, faults = net(inputs), {}
    for path, answer in formats.answers(files, inputs).items():
        fault = answer
        if not isinstance(answer, str):
            fault = formats.disagreement(logits.flatten(0, -2), answer.flatten(0, -2), exact=True)
        if fault:
            faults[path.name] = str(fault)
    return faults
