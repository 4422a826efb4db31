"""What kd.py does with its students: `hf/` of models of texts, and the folders of `export`.

The one module of this package that kd.py knows, by its name: it is imported where a run has something to export.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from deploy.export import check_folder, export_nets
from deploy.language_models import write_language_models
from deploy.sentence_models import write_sentence_models
from harness.runs.launch import is_main_process
from harness.runs.quiet import notice
from harness.runs.session import Session


def check_students(run: Session, names: Iterable[str]) -> None:
    """Raise BadInput if the students of `export` can't be written; a resumed run replaces their export."""
    replaces = run.config.overwrite or run.config.resume  # they exclude one another, and `overwrite` deletes the run
    for name in names:
        check_folder(Path(run.config.export) / name, "export", replaces)


def export_students(run: Session, names: Collection[str], failed: Mapping[str, str]) -> None:
    """Write `hf/` of models of texts, and the folders of `export`; `failed` says of students why they have none."""
    write_language_models(run, names, failed)
    write_sentence_models(run, names, failed)
    if run.config.export:
        _export(run, names, failed)


def _export(run: Session, names: Iterable[str], failed: Mapping[str, str]) -> None:
    """Export the students of the first seed, in the main process; SystemExit with code 1 if a file is left out.

    A line for each of those that failed says why it is not exported.
    """
    if is_main_process():
        folder = run.out / f"seed{run.config.seeds[0]}"
        for name, why in failed.items():
            notice(f"{name} is not exported: {why}")
        export_nets({folder / name: Path(run.config.export) / name for name in names if name not in failed})
