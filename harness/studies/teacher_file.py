"""A teacher without weights: its outputs in a file (`teacher Outputs`), found for a run's data, or a server's."""

import hashlib
from pathlib import Path

from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from harness.reports.tables import join_words
from harness.runs.session import Session
from harness.runs.teacher_weights import TEACHER, is_teacher
from lit_modules.nets.identity import Origin
from lit_modules.nets.output_file import Outputs
from lit_modules.nets.stored import TeacherInFile
from lit_modules.tasks import task_class
from strategies import PipelineStrategy

OF_WEIGHTS = "teacher_ckpt", "teacher_epochs", "teacher_head_only"  # options of a teacher that has some


def find_outputs(session: Session, net: TeacherInFile, key: str) -> TeacherInFile:
    """Return a teacher in a file with its outputs for the run's data; a line says which parts it does not score.

    One that is served is returned as it is.

    Raises:
        BadInput: the file lacks a training sample, or one of another part where nets are judged beside the teacher.
    """
    if not is_teacher(key):
        raise BadInput(key, type(net).__name__, "a net that learns; this one is a teacher, without weights")
    if not isinstance(net, Outputs):
        return net
    task, parts = task_class(session.data.task), [part for part, size in session.data.sizes.items() if size]
    found = net.of_data(session.data, task.outputs, parts if task.beside_teacher else ["train"])
    if found.note:
        session.tell(f"`{key}.file {net.file}`: {found.note}")
    if missing := [part for part in parts if part not in found.parts]:
        session.tell(f"`{key}.file {net.file}` lacks samples of {join_words(missing)}: the teacher is not scored there")
    return found


def check_in_file(session: Session, net: TeacherInFile, key: str, trainer: Trainer) -> None:
    """Note what a teacher in a file is; raise BadInput beside settings of one that has weights."""
    chosen = f"`teacher {type(net).__name__}`"
    if isinstance(trainer.strategy, PipelineStrategy):
        raise BadInput("trainer.strategy", "pipeline", f"not allowed with {chosen}, which has no layers to cut")
    for option in OF_WEIGHTS if key == TEACHER else ():
        if value := vars(session.config).get(option):
            raise BadInput(option, value, f"not allowed with {chosen}, which has no weights")
    if not isinstance(net, Outputs):
        return
    with Path(net.file).expanduser().open("rb") as file:
        session.origins[key] = Origin({}, hashlib.file_digest(file, "sha256").hexdigest())
