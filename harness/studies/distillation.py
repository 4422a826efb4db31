"""The distillation study: for each seed a teacher and its students, then one table of all seeds.

A finished run may grow. Its students are those of one fit, `students`, and of a further one for those that came each
time, `students-2` and so on: a student is the same alone and in company. Teachers are kept, and new seeds' teachers
have as many epochs.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from apprentice.errors import BadInput
from harness import config as cli
from harness.config.sources import load
from harness.reports.metrics import ACCURACY, BITS
from harness.reports.pages import save_results, text
from harness.reports.report import Facts
from harness.reports.results import bake_off_results, load_record
from harness.runs import safepoints
from harness.runs.files import write_json
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import load_net
from harness.runs.session import Session
from harness.studies.callbacks import check_callbacks
from harness.studies.fits import Candidate, check_modules, check_net, failure, log_means, train
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation

FITS = ("teacher", "students")  # of each seed

MakeTeacher = Callable[[Session, int], tuple[LitClassifier, dict[str, Candidate]]]
MakeStudents = Callable[[Session, int, nn.Module, Sequence[str]], tuple[Distillation, dict[str, Candidate]]]


def check(run: Session, make_teacher: MakeTeacher, make_students: MakeStudents) -> None:
    """Build everything once; raise BadInput if something can't be trained."""
    trainer, (first, *others), ckpt = run.checked_trainer(), run.config.seeds, run.config.teacher_ckpt
    check_net(run, "teacher", trainer, trained=ckpt is None)
    check_net(run, "student", trainer)
    for seed in others if "{seed}" in (ckpt or "") else ():
        make_teacher(run, seed)
    teacher, _ = make_teacher(run, first)
    students, _ = make_students(run, first, teacher.net, names(run))
    check_modules(trainer, teacher, students)
    check_callbacks(
        run, trainer, {"students": students} if ckpt is not None else {"teacher": teacher, "students": students}
    )


def names(run: Session) -> list[str]:
    """The students to train."""
    return list(cli.pick(run.config.variants, run.config.only))


def run_study(run: Session, make_teacher: MakeTeacher, make_students: MakeStudents) -> None:
    """Train and test teacher and students for each seed, then print and save the table."""
    with main_first("records"):
        _date_records(run)
    run.describe()
    ckpt, out, teachers, students = run.config.teacher_ckpt, run.out, [], []

    def with_teacher(seed: int, members: Sequence[str]) -> tuple[Distillation, dict[str, Candidate]]:
        return make_students(run, seed, load_net(out / f"seed{seed}" / "teacher", "out"), members)

    epochs, nets = _teacher_epochs(run), ["teacher", *names(run)]
    log_means(run, nets)
    for seed in run.config.seeds:
        make = partial(make_teacher, run, seed)
        teachers.append(train(run, seed, "teacher", make, trained=ckpt is not None, fits=FITS, max_epochs=epochs))
        if fault := failure(teachers[-1], "teacher"):
            expected = f"settings that train the teacher; with seed {seed} {fault}"
            raise BadInput("optimizer", run.config.optimizer.name, expected)
        with main_first(f"students of seed {seed}"):
            fits = _fits(out / f"seed{seed}", names(run))
        made = {fit: partial(with_teacher, seed, members) for fit, members in fits.items()}
        students.append([train(run, seed, fit, make, keep=True, fits=FITS) for fit, make in made.items()])
    if not is_main_process():
        return
    log_means(run, nets)
    results = bake_off_results(
        run.header(),
        [fit["runs"]["teacher"] | {key: fit.get(key) for key in ("fit_seconds", "max_epochs")} for fit in teachers],
        {name: [_facts(fits, name) for fits in students] for name in names(run)},
        [sum(fit["fit_seconds"] for fit in fits) for fits in students],
        ACCURACY if run.data.tokens_per_character is None else BITS,
        one_teacher=ckpt is not None and "{seed}" not in ckpt,
    )
    save_results(out, results)
    print(f"{text(results)}\n\n{out}/results.md, .png, .json; curves: tensorboard --logdir {out}")


def _facts(fits: Sequence[Facts], name: str) -> Facts:
    return next(fit["runs"][name] for fit in fits if name in fit["runs"])


def _fits(folder: Path, wanted: Sequence[str]) -> dict[str, list[str]]:
    """A seed's fits of students: those that the folder has, finished or not, and one of the students that are new."""
    found: dict[str, list[str]] = {}
    fits = itertools.chain(["students"], (f"students-{number}" for number in itertools.count(2)))
    while members := set(_members(folder, fit := next(fits))):
        found[fit] = [name for name in wanted if name in members]
    new = [name for name in wanted if not any(name in others for others in found.values())]
    return found | ({fit: new} if new else {})


def _members(folder: Path, fit: str) -> Iterator[str]:
    """The students in the record of a fit or, if it is not finished, in its checkpoint."""
    record, checkpoint = folder / f"{fit}.json", folder / f"{fit}.ckpt"
    if record.exists():
        yield from load_record(record)["runs"]
    elif checkpoint.exists():
        keys = safepoints.read(checkpoint)["state_dict"]
        yield from (key.split(".")[1] for key in keys if key.startswith("students."))


def _teacher_epochs(run: Session) -> int | None:
    """Epochs of all teachers: those of the first that is finished, otherwise the Trainer's."""
    records = (run.out / f"seed{seed}" / "teacher.json" for seed in run.config.seeds)
    found = (load_record(record).get("max_epochs") for record in records if record.exists())
    return next(filter(None, found), run.config.trainer.init_args["max_epochs"])


def _date_records(run: Session) -> None:
    """Before the run's epochs change, write into the records of an older version how many theirs were."""
    settings, now = run.out / "config.yaml", run.config.trainer.init_args["max_epochs"]
    before = load(settings)["trainer"]["max_epochs"] if settings.exists() else now
    if before == now:
        return
    for folder in (run.out / f"seed{seed}" for seed in run.config.seeds):
        for checkpoint in folder.glob("*.ckpt"):
            if safepoints.max_epochs(safepoints.read(checkpoint)) is None:
                expected = (
                    f"{before} until this run, which an older version began, is finished; resume it as it is first"
                )
                raise BadInput("trainer.max_epochs", now, expected)
        for record in (folder / "teacher.json", folder / "students.json"):
            facts = load_record(record) if record.exists() else {"max_epochs": None}
            if "max_epochs" not in facts and facts["fit_seconds"] is not None:
                write_json(record, {"fit_seconds": facts["fit_seconds"], "max_epochs": before, "runs": facts["runs"]})
