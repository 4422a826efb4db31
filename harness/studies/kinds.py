"""What a kind of data adds to a comparison beside its training: the port through which a new kind comes in."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from torch import nn

from apprentice.batch import Batch
from apprentice.errors import BadInput
from harness import cli
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.plans import Arm, FitOutcome, FitPlan
from harness.runs.records import NetRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import TAUGHT_BY, TEACHER, TeacherWeights, format_teachers
from harness.start import called_as
from harness.studies.teachers import has_trained_teacher
from harness.studies.training_flops import LearnedBatches, count_training
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.identity import Origin
from lit_modules.nets.outputs import CLASSES
from lit_modules.objectives.base import Objective
from lit_modules.tasks import task_class
from lit_modules.training.loop import Loop

# By the data's task; imported where such data are chosen.
KINDS = {
    "tokens": "harness.studies.text.kind.TextKind",
    "embedding": "harness.studies.embedding.kind.EmbeddingKind",
    "retrieval": "harness.studies.embedding.text_kind.RetrievalKind",
}


# Options that data of some tasks add to kd.py, and the word for such data.
OPTIONS = {
    ("tokens",): ("harness.studies.text.options.TextOptions", "texts"),
    ("embedding", "retrieval"): ("harness.studies.embedding.options.EmbeddingOptions", "`data.task embedding`"),
}


class DataKind:
    """What data whose samples have one label each, such as images, add to a comparison.

    The session is an argument where a search, or a job, has another than the comparison.

    Args:
        session: the comparison's; its data are not loaded yet.
        arms: all arms that may train.

    Attributes:
        exports_students: whether students are written for other libraries without `export`, too.
        settings: flags and values of a run with such data, where the user sets no others.
    """

    exports_students = False
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, session: Session, arms: Iterable[Arm]) -> None:
        self.session, self.config = session, session.config

    def check(self) -> None:
        """Raise BadInput for options of this kind of data that can't be used."""

    @contextmanager
    def data_of_teacher(self, session: Session, key: str = TEACHER) -> Iterator[None]:
        """Inside, the session's data are as the teacher chosen under a key takes them."""
        yield

    def has_trained_teacher(self, session: Session, key: str = TEACHER) -> bool:
        """Return whether the teacher chosen under a key is loaded, not trained."""
        return has_trained_teacher(session, key)

    def stand_in(self, seed: int) -> nn.Module | None:
        """Return a net that stands for a seed's teacher, of which all that is needed is stored; None: it is needed."""
        return None

    def is_stand_in(self, folder: Path) -> bool:
        """Return whether a folder's net is such a one; BadInput if there is none."""
        return False

    def teacher_source(self, seed: int) -> str | None:
        """Return what tells a seed's teacher without loading it, if it may not be loaded."""
        return None

    def origins(self, session: Session) -> dict[str, Origin]:
        """Return what a run that grows has to find again, beside nets, by its flag."""
        return {}

    def prepare_teacher(self, session: Session, teacher: nn.Module, arms: Iterable[Arm]) -> nn.Module:
        """Return a teacher that takes these students' inputs; BadInput if they can't learn from it."""
        return teacher

    def prepare_student(self, session: Session, net: nn.Module, teacher: nn.Module, seed: int) -> nn.Module:
        """Return the net of a student with this seed, of a teacher that `prepare_teacher` gave."""
        return net

    def merge_teachers(self, session: Session, nets: Mapping[str, nn.Module], shares: TeacherWeights) -> nn.Module:
        """Return the teacher of students that learn from nets, by the flags that choose them, with these weights."""
        if len(nets) == 1:
            return next(iter(nets.values()))
        if (outputs := task_class(session.data.task).outputs) != CLASSES:
            expected = f"one teacher for each student: several are averaged as probabilities of classes, not {outputs}"
            raise BadInput(TAUGHT_BY, format_teachers(shares), expected)
        return Ensemble([*nets.values()], [*shares.values()])

    def prepare_objective(self, objective: Objective, teacher: nn.Module) -> Objective:
        """Return the method of a student of a teacher that `prepare_teacher` gave."""
        return objective

    def module_arguments(self, seed: int) -> dict[str, Any]:
        """Return arguments of the `Distillation` of a seed."""
        return {}

    def before_seed(self, seed: int) -> None:
        """Prepare a seed's folder, in all processes in turn."""

    def after_seed(self, seed: int) -> None:
        """Keep what a seed's fits have left."""

    def count_training(self, module: Loop, run: str, batch: Batch, trained: LearnedBatches) -> int | None:
        """Count the operations of a run's training, see `harness.studies.training_flops.count_training`."""
        return count_training(module, run, batch, trained)

    def add_figures(
        self, session: Session, plan: FitPlan, arm: Arm, net: nn.Module, outcome: FitOutcome, record: NetRecord
    ) -> NetRecord:
        """Return the record of a net that was fitted, with figures of this kind of data."""
        return record

    def sections(self, session: Session, results: Results) -> list[Section]:
        """Return sections of report.html."""
        return []

    def next_steps(self, session: Session, folder: str) -> dict[str, str]:
        """Return commands for a net's folder, quoted for a shell, by the word for what they do."""
        if session.data.preparation.kind == "tensors":  # made by a data module of the user's own
            return {}
        return {"predict": command_line("predict.py", run=folder, inputs="FOLDER")}

    def finish(self, session: Session, teachers: Iterable[str], students: Iterable[str]) -> None:
        """Write files of this kind into the folders of nets of these names."""


def kind_of(session: Session, arms: Iterable[Arm]) -> DataKind:
    """Return what the chosen data add."""
    task = task_of_choice(session.config.data)
    kind: type[DataKind] = resolve_name(KINDS[task]) if task in KINDS else DataKind
    return kind(session, arms)


def task_of_choice(data: cli.Choice) -> str:
    """Return the task of the data that are chosen; "" of other people's."""
    return str(data.init_args.get("task") or getattr(data.target, "task", ""))


def options_by_task() -> list[cli.Group]:
    """Return the options that data of each task add."""

    def applies(tasks: Collection[str], data: cli.Choice) -> bool:
        return task_of_choice(data) in tasks

    return [cli.Group("data", partial(applies, tasks), *options) for tasks, options in OPTIONS.items()]


def settings_by_task() -> dict[str, dict[str, Any]]:
    """Return the settings that data of each task bring."""
    return {task: resolve_name(path).settings for task, path in KINDS.items()}


def command_line(script: str, **flags: str) -> str:
    """Return a command line of this project, as the user calls its scripts."""
    return " ".join([called_as(script), *cli.argv_of(flags)])
