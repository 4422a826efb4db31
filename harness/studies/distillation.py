"""The distillation study: for each seed a teacher and its students, then one table of all seeds."""

from collections.abc import Callable
from functools import partial

from torch import nn

from apprentice.errors import BadInput
from harness.reports.metrics import ACCURACY, BITS
from harness.reports.pages import save_results, text
from harness.reports.report import Facts
from harness.reports.results import bake_off_results
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net
from harness.runs.session import Session
from harness.studies.builders import check_modules, check_net
from harness.studies.fits import Candidate, failure, train
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation

MakeTeacher = Callable[[int], tuple[LitClassifier, dict[str, Candidate]]]
MakeStudents = Callable[[int, nn.Module], tuple[Distillation, dict[str, Candidate]]]


class DistillationStudy:
    """Trains teachers and students, compares the students.

    Args:
        run: the session of kd.py.
        teacher: makes a seed's teacher, loaded if `--teacher_ckpt` is given.
        students: makes the module of all students of a seed and a teacher.
    """

    def __init__(self, run: Session, teacher: MakeTeacher, students: MakeStudents) -> None:
        self.session, self.teacher, self.students = run, teacher, students
        self.ckpt: str | None = run.config.teacher_ckpt

    def check(self) -> None:
        """Build everything once.

        Raises:
            BadInput: something can't be trained.
        """
        trainer, (first, *others) = self.session.checked_trainer(), self.session.config.seeds
        check_net(self.session, "teacher", trainer, trained=self.ckpt is None)
        check_net(self.session, "student", trainer)
        for seed in others if "{seed}" in (self.ckpt or "") else ():
            self.teacher(seed)
        teacher, _ = self.teacher(first)
        students, _ = self.students(first, teacher.net)
        check_modules(trainer, teacher, students)

    def run(self) -> None:
        """Train and test for each seed, then print and save the table.

        Raises:
            BadInput: a teacher's loss is not finite.
        """
        self.session.describe()
        teachers, students = [], []
        for seed in self.session.config.seeds:
            teachers.append(self._teacher(seed))
            students.append(train(self.session, seed, "students", partial(self._students, seed)))
        if is_main_process():
            self._report(teachers, students)

    def _teacher(self, seed: int) -> Facts:
        facts = train(self.session, seed, "teacher", partial(self.teacher, seed), trained=self.ckpt is not None)
        if fault := failure(facts, "teacher"):
            optimizer = self.session.config.optimizer.name
            raise BadInput("optimizer", optimizer, f"settings that train the teacher; with seed {seed} {fault}")
        return facts

    def _students(self, seed: int) -> tuple[Distillation, dict[str, Candidate]]:
        return self.students(seed, load_net(self.session.out / f"seed{seed}" / "teacher", "out"))

    def _report(self, teachers: list[Facts], students: list[Facts]) -> None:
        out = self.session.out
        results = bake_off_results(
            self.session.header(),
            [{**fit["runs"]["teacher"], "fit_seconds": fit["fit_seconds"]} for fit in teachers],
            {name: [fit["runs"][name] for fit in students] for name in students[0]["runs"]},
            [fit["fit_seconds"] for fit in students],
            ACCURACY if self.session.data.tokens_per_character is None else BITS,
            one_teacher=self.ckpt is not None and "{seed}" not in self.ckpt,
        )
        save_results(out, results)
        print(f"{text(results)}\n\n{out}/results.md, .png, .json; curves: tensorboard --logdir {out}")
