"""What `export.py` and kd.py's `--export` do: folders that run without this project, and a push to a hub."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from apprentice.errors import BadInput
from harness import cli
from harness.runs.launch import is_main_process
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies.deploy.hub import check_repo, push
from harness.studies.deploy.package import check_package, export_net


@dataclass
class Options(cli.OneSeedOptions):
    """Options of an export.

    Args:
        run: the net's folder, such as RUN/seed0/kd.
        out: the folder that is written.
        overwrite: replace an export in that folder.
        push: a repository on the Hugging Face hub that gets the folder, as NAME/MODEL; it is made if it is not there.
        push_public: whether a repository that is made is public.
    """

    run: str | None = None
    out: str | None = field(default="exported", metadata=cli.CALL.metadata)
    push: str | None = None
    push_public: bool = False
    why_one: ClassVar[str] = "nothing is drawn"
    why_inexact: ClassVar[str] = "nothing is trained"
    idle: ClassVar[tuple[str, ...]] = ("seeds", "resume", "checkpoint_every", "num_classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            raise BadInput("resume", "true", "it left out: --overwrite true writes the folder again")


def export(config: Namespace) -> None:
    """Export a net, and push it; SystemExit with code 1 if a file could not be written as the net is."""
    if not config.run:
        raise BadInput("run", "(nothing)", "a net's folder, as RUN/seed0/kd")
    out = Path(config.out)
    check_package(out, "out", config.overwrite)
    if config.push:
        check_repo(config.push)
    if not is_main_process():
        return
    export_all({Path(config.run): out})
    if config.push:
        print(push(out, config.push, private=not config.push_public))


def check_students(run: Session, names: Iterable[str]) -> None:
    """Raise BadInput if the students of `--export` can't be written; a resumed run replaces their export."""
    replaces = run.config.overwrite or run.config.resume  # they exclude one another, and `overwrite` deletes the run
    for name in names:
        check_package(Path(run.config.export) / name, "export", replaces)


def export_students(run: Session, names: Iterable[str], failed: Mapping[str, str]) -> None:
    """Export the students of the first seed, in the main process; SystemExit with code 1 if a file is left out.

    A line for each of those that failed says why it is not exported.
    """
    if is_main_process():
        folder = run.out / f"seed{run.config.seeds[0]}"
        for name, why in failed.items():
            notice(f"{name} is not exported: {why}")
        export_all({folder / name: Path(run.config.export) / name for name in names if name not in failed})


def export_all(folders: dict[Path, Path]) -> None:
    """Export nets from folders to folders; SystemExit with code 1 if a file is left out, which stderr names."""
    failed = {out / file: why for net, out in folders.items() for file, why in export_net(net, out).items()}
    for out in folders.values():
        print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    for file, why in failed.items():
        sys.stderr.write(f"{file} is left out: {why}\n")
    if failed:
        raise SystemExit(1)
