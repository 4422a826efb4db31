"""Export: a trained net as a folder that runs without this project, with a model card."""

import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from apprentice import extras, keyed
from apprentice.errors import BadInput
from deploy.card import model_card
from deploy.export_folder import CARD, FOLDER, FORMATS, LABELS, SPEC, USE
from deploy.verify import fault_of, read_back
from deploy.writers import EXTRA, write_files
from harness import cli
from harness.runs import signals
from harness.runs.facts import KEYS, NetFacts
from harness.runs.files import UNFINISHED, atomic_folder, can_be_written, write_text
from harness.runs.launch import find_launch, is_main_process
from harness.runs.nets import load_net, read_facts, read_spec, write_spec
from harness.runs.options import OneSeedOptions
from lit_modules.tasks import CLASSES, task_class

TEMPLATES = Path(__file__).parent / "use"
TRIED = 64  # random inputs by which files are compared with the net


@dataclass
class Options(OneSeedOptions):
    """Options of an export."""

    run: str | None = None
    """the net's folder, such as RUN/seed0/kd."""
    out: str | None = cli.option("exported", on_resume=cli.CALL)
    """the folder that is written."""
    overwrite: bool = cli.option(False, on_resume=cli.CALL)
    """replace an export in that folder."""
    why_one: ClassVar[str] = "nothing is drawn"
    why_inexact: ClassVar[str] = "nothing is trained"
    idle: ClassVar[tuple[str, ...]] = ("seeds", "resume", "checkpoint_every", "num_classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is None:
            raise BadInput("out", "null", "a folder, as exported")
        if self.resume:
            raise BadInput("resume", "true", "not allowed; `overwrite true` writes the folder again")


def export(config: Namespace) -> None:
    """Export a net; SystemExit with code 1 if a file could not be written as the net is."""
    if not config.run:
        raise BadInput("run", "(nothing)", "a net's folder, as RUN/seed0/kd")
    out = Path(config.out)
    check_folder(out, "out", config.overwrite)
    if not is_main_process():
        sys.stderr.write(f"nothing is left to do for {find_launch()}: rank 0 exports\n")
        return
    with signals.advise_at_stop(f"stopped; {out} is as it was\n"):
        export_nets({Path(config.run): out})


def export_nets(folders: dict[Path, Path]) -> None:
    """Export nets from folders to folders; SystemExit with code 1 if a file is left out, which stderr names."""
    failed = {out / file: why for net, out in folders.items() for file, why in export_net(net, out).items()}
    for out in folders.values():
        print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    for file, why in failed.items():
        sys.stderr.write(f"{file} is left out: {why}\n")
    if failed:
        raise SystemExit(1)


def check_folder(out: Path, flag: str, overwrite: bool) -> None:
    """Raise BadInput if a folder can't be written, or holds other files; Missing if a library is not installed."""
    extras.need(*EXTRA)
    if not can_be_written(out):
        raise BadInput(flag, out, "a folder that can be written")
    files = sorted(path for path in out.iterdir() if not path.name.startswith(UNFINISHED)) if out.is_dir() else []
    is_export, ours = (out / SPEC.name).is_file(), {file.name for file in FOLDER}
    strangers = [path.name for path in files if not is_export or path.name not in ours or not path.is_file()]
    if files and (strangers or not overwrite):
        advice = "a new folder" if strangers else "a new folder; or `overwrite true`"
        raise BadInput(flag, out, f"{advice}; this one holds {strangers[0] if strangers else files[0].name}")


def export_net(folder: Path, out: Path) -> dict[str, str]:
    """Export the net of a run's folder, RUN/seed<k>/<name>, in float32; return what failed, by file.

    Each file is read in a fresh process, which answers for random inputs, and compared with the net. Then all get their
    names in `out`: an export that is interrupted leaves there what was there.

    Raises:
        BadInput: there is no net in the folder, or it is of a version that did not say what inputs it takes.
    """
    facts = read_facts(folder)
    if facts is None:
        raise BadInput("run", folder, f"a net whose net.yaml says its {', '.join(KEYS[1:])}; train it again")
    net = load_net(folder).float()
    inputs, count = example_of(net, facts)
    has_classes = task_class(facts.task).outputs == CLASSES
    facts = facts if facts.classes or not has_classes else replace(facts, classes=tuple(map(str, range(count))))
    with atomic_folder(out) as unfinished:
        write_spec(read_spec(folder), unfinished, facts)
        failed = _write_formats(net, inputs, facts, unfinished)
        if has_classes:
            write_text(unfinished / LABELS.name, "".join(f"{name}\n" for name in facts.classes))
        write_text(unfinished / USE.name, (TEMPLATES / f"{facts.inputs.kind}.py.txt").read_text("utf-8"))
        write_text(unfinished / CARD.name, model_card(folder, facts, sum(p.numel() for p in net.parameters())))
    for file in failed:  # of an earlier export
        (out / file).unlink(missing_ok=True)
    return failed


@torch.no_grad()
def _write_formats(net: nn.Module, inputs: Tensor, facts: NetFacts, folder: Path) -> dict[str, str]:
    """Write a net in each format into a folder; return why a file is left out, as what it answers is not the net's."""
    files = [file for file in FOLDER if file in FORMATS["float32"]]
    errors = write_files(files, net, inputs, folder, facts, place=folder.parent)
    failed = {f.name: " ".join(f"{type(error).__name__}: {error}".split())[:200] for f, error in errors.items()}
    expected = net(inputs)
    for path, logits in read_back([folder / file.name for file in files if file not in errors], inputs).items():
        if fault := fault_of(expected, logits, exact=True):
            failed[path.name] = fault
    for file in failed:
        (folder / file).unlink(missing_ok=True)
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
