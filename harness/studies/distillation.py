"""The distillation study: for each seed a teacher and its students, then one table of all seeds."""

from collections.abc import Callable
from functools import partial

from torch import nn

from apprentice.errors import BadInput
from harness.reports.metrics import ACCURACY, BITS
from harness.reports.pages import save_results, text
from harness.reports.results import bake_off_results
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net
from harness.runs.session import Session
from harness.studies.fits import Candidate, check_modules, check_net, failure, log_means, train
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation

MakeTeacher = Callable[[Session, int], tuple[LitClassifier, dict[str, Candidate]]]
MakeStudents = Callable[[Session, int, nn.Module], tuple[Distillation, dict[str, Candidate]]]


def check(run: Session, make_teacher: MakeTeacher, make_students: MakeStudents) -> None:
    """Build everything once; raise BadInput if something can't be trained."""
    trainer, (first, *others), ckpt = run.checked_trainer(), run.config.seeds, run.config.teacher_ckpt
    check_net(run, "teacher", trainer, trained=ckpt is None)
    check_net(run, "student", trainer)
    for seed in others if "{seed}" in (ckpt or "") else ():
        make_teacher(run, seed)
    teacher, _ = make_teacher(run, first)
    check_modules(trainer, teacher, make_students(run, first, teacher.net)[0])


def run_study(run: Session, make_teacher: MakeTeacher, make_students: MakeStudents) -> None:
    """Train and test teacher and students for each seed, then print and save the table."""
    run.describe()
    ckpt, out, teachers, students = run.config.teacher_ckpt, run.out, [], []

    def with_teacher(seed: int) -> tuple[Distillation, dict[str, Candidate]]:
        return make_students(run, seed, load_net(out / f"seed{seed}" / "teacher", "out"))

    log_means(run, "teacher", "students")
    for seed in run.config.seeds:
        teachers.append(train(run, seed, "teacher", partial(make_teacher, run, seed), trained=ckpt is not None))
        if fault := failure(teachers[-1], "teacher"):
            expected = f"settings that train the teacher; with seed {seed} {fault}"
            raise BadInput("optimizer", run.config.optimizer.name, expected)
        students.append(train(run, seed, "students", partial(with_teacher, seed)))
    if not is_main_process():
        return
    log_means(run, "teacher", "students")
    results = bake_off_results(
        run.header(),
        [{**fit["runs"]["teacher"], "fit_seconds": fit["fit_seconds"]} for fit in teachers],
        {name: [fit["runs"][name] for fit in students] for name in students[0]["runs"]},
        [fit["fit_seconds"] for fit in students],
        ACCURACY if run.data.tokens_per_character is None else BITS,
        one_teacher=ckpt is not None and "{seed}" not in ckpt,
    )
    save_results(out, results)
    print(f"{text(results)}\n\n{out}/results.md, .png, .json; curves: tensorboard --logdir {out}")
