"""The distillation study: for each seed a teacher and its students, then one table of all seeds.

A finished run may grow. Its students are those of one fit, `students`, and of a further one for those that came each
time, `students-2` and so on: a student is the same alone and in company. Teachers are kept, and new seeds' teachers
have as many epochs.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from lightning.pytorch import Trainer
from torch import nn

from apprentice.errors import BadInput
from harness import cli
from harness.cli.classes import imported
from harness.reports.interactive import save_results
from harness.reports.pages import text
from harness.reports.results import combine
from harness.reports.search import Search
from harness.runs import calls, safepoints
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import load_net
from harness.runs.records import FitRecord, NetRecord
from harness.runs.session import Session
from harness.studies import zoo
from harness.studies.callbacks import check_callbacks
from harness.studies.fits import (
    Candidate,
    check_batch_size,
    check_modules,
    check_net,
    judged_by,
    log_means,
    save_classifier,
    train,
)
from harness.studies.setups import Setup, rows, wanted
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation

MakeTeacher = Callable[[Session, int], tuple[LitClassifier, dict[str, Candidate]]]
MakeStudents = Callable[[Session, int, nn.Module, Mapping[str, Setup]], tuple[Distillation, dict[str, Candidate]]]


def check(run: Session, make_teacher: MakeTeacher, make_students: MakeStudents) -> dict[str, Setup]:
    """Build everything once and return the students to train; raise BadInput if something can't be trained.

    Under `--zoo`, methods that don't fit the nets are left out, and named with the reason.
    """
    trainer, (first, *others), ckpt = run.checked_trainer(), run.config.seeds, run.config.teacher_ckpt
    setups = wanted(run.config)
    _check_head_only(run)
    check_net(run, "teacher", trainer, trained=not has_trained_teacher(run))
    for net in dict.fromkeys(row.net for row in rows(setups.values())):
        check_net(run, net, trainer)
    for seed in others if "{seed}" in (ckpt or "") else ():
        make_teacher(run, seed)
    teacher, _ = make_teacher(run, first)
    if not has_trained_teacher(run):  # before it is frozen
        teacher.check_optimizer(_steps(run, trainer, run.config.teacher_epochs))

    def made(names: Sequence[str]) -> Distillation:
        with cli.flags_of(rows(setups.values())):
            students, _ = make_students(run, first, teacher.net, {name: setups[name] for name in names})
            check_modules(run, trainer, teacher, students)
            students.check_batch(min(run.data.batch_size, run.data.sizes["train"]))
            students.check_optimizer(_steps(run, trainer))
        return students

    names = zoo.fitting(run.config, run.parser, setups, made) if run.config.zoo else list(setups)
    students = made(names)
    stages = {} if has_trained_teacher(run) else {"teacher": teacher}
    check_batch_size(run, *stages.values(), students)
    check_callbacks(run, trainer, {**stages, "students": students})
    return {name: setups[name] for name in names}


def _steps(run: Session, trainer: Trainer, epochs: int | None = None) -> float:
    """The optimizer's steps in a fit of so many epochs, by default the Trainer's, of which -1 is no limit."""
    options = run.config.trainer.init_args
    an_epoch = math.ceil(run.data.train_batches(trainer) / options["accumulate_grad_batches"])
    limits = (
        steps for steps in (an_epoch * (epochs or options["max_epochs"] or -1), options["max_steps"]) if steps >= 0
    )
    return min(limits, default=math.inf)


def has_trained_teacher(run: Session) -> bool:
    """Whether the teacher is loaded, not trained."""
    made, config = imported(run.config.teacher.class_path, "teacher"), run.config
    brings = config.teacher.init_args.get(getattr(made, "trained_if", ""), False)
    loaded = config.teacher_ckpt is not None or brings
    return (loaded and not config.teacher_epochs) or getattr(made, "is_trained", False)


def _check_head_only(run: Session) -> None:
    """Raise BadInput if the teacher's head alone is to be trained and the rest is new, or nothing is trained."""
    chosen = run.config.teacher
    own = getattr(imported(chosen.class_path, "teacher"), "untrained", {})  # options by which a net brings weights
    brings = any(chosen.init_args.get(name) != value for name, value in own.items())
    loads = brings or run.config.teacher_ckpt is not None
    if run.config.teacher_head_only and (not loads or has_trained_teacher(run)):
        expected = "--teacher_ckpt FILE and --teacher_epochs N beside it, or a teacher with --teacher.weights"
        raise BadInput("teacher_head_only", "true", expected)


def begin(run: Session) -> None:
    """Write the run's settings into its folder."""
    run.describe()


def run_study(
    run: Session,
    make_teacher: MakeTeacher,
    make_students: MakeStudents,
    setups: Mapping[str, Setup],
    search: Search | None = None,
) -> None:
    """Train and test teacher and students for each seed, then print and save the table, and what a search found."""
    loaded, out, teachers, students = has_trained_teacher(run), run.out, [], []

    def with_teacher(seed: int, members: Sequence[str]) -> tuple[Distillation, dict[str, Candidate]]:
        chosen = {name: setups[name] for name in members}
        return make_students(run, seed, load_net(out / f"seed{seed}" / "teacher", "out"), chosen)

    names = list(setups)
    epochs, nets, seeds = teacher_epochs(run), ["teacher", *names], run.config.seeds
    with main_first("students"):
        fits = {seed: _fits(out / f"seed{seed}", names) for seed in seeds}
        for members in (members for found in fits.values() for members in found.values()):
            _check_peers(run, [setups[name] for name in members])
    own, plan = run.config.trainer.init_args["max_epochs"], dict[tuple[int, str], int | None]()
    for seed in seeds:
        plan |= {(seed, "teacher"): None if loaded else epochs, **{(seed, fit): own for fit in fits[seed]}}
    log_means(run, nets)
    for seed in seeds:
        make = partial(make_teacher, run, seed)
        fit = train(run, seed, "teacher", make, trained=loaded, plan=plan, all_labels=True, max_epochs=epochs)
        teachers.append(fit)
        check_teacher(run, seed, fit)
        made = {fit: partial(with_teacher, seed, members) for fit, members in fits[seed].items()}
        students.append([train(run, seed, fit, make, keep=True, plan=plan) for fit, make in made.items()])
        for net in nets if run.config.save_ckpt and is_main_process() else ():
            save_classifier(run, seed, net)
    if not is_main_process():
        return
    log_means(run, nets)
    results = combine(
        run.header(),
        teachers,
        {name: [_net(fits, name) for fits in students] for name in names},
        [sum(fit.fit_seconds or 0.0 for fit in fits) for fits in students],
        judged_by(run.config, run.data),
        one_teacher=loaded and "{seed}" not in (run.config.teacher_ckpt or ""),
        variants={name: setup.row.variant for name, setup in setups.items()},
        ranked=run.config.zoo,
    )
    results.classes, results.search = list(getattr(run.data, "class_names", ())), search
    save_results(out, results, run.data.test_images, calls.commands(out))
    print(f"{text(results)}\n\n{out}/report.html, results.md, .png, .json; curves: tensorboard --logdir {out}")


def _net(fits: Sequence[FitRecord], name: str) -> NetRecord:
    return next(fit.nets[name] for fit in fits if name in fit.nets)


def _fits(folder: Path, wanted: Sequence[str]) -> dict[str, list[str]]:
    """A seed's fits of students: those that the folder has, finished or not, and one of the students that are new."""
    found: dict[str, list[str]] = {}
    fits = itertools.chain(["students"], (f"students-{number}" for number in itertools.count(2)))
    while members := set(_members(folder, fit := next(fits))):
        found[fit] = [name for name in wanted if name in members]
    new = [name for name in wanted if not any(name in others for others in found.values())]
    return found | ({fit: new} if new else {})


def _check_peers(run: Session, fit: Sequence[Setup]) -> None:
    """BadInput if a student learns from one that was trained before it."""
    names = {setup.name for setup in fit}
    for setup in fit:
        if earlier := [peer for peer in setup.objective(run.config).peers if peer not in names]:
            expected = f"students that begin with it; {earlier[0]} was trained before: take another --out"
            raise BadInput(f"variants.{setup.name}.peers", earlier[0], expected)


def _members(folder: Path, fit: str) -> Iterator[str]:
    """The students in the record of a fit or, if it is not finished, in its checkpoint."""
    record, checkpoint = folder / f"{fit}.json", folder / f"{fit}.ckpt"
    if record.exists():
        yield from FitRecord.read(record).nets
    elif checkpoint.exists():
        keys = safepoints.read(checkpoint)["state_dict"]
        yield from (key.split(".")[1] for key in keys if key.startswith("students."))


def check_teacher(run: Session, seed: int, fit: FitRecord) -> None:
    """Raise BadInput if a seed's teacher has failed."""
    if fault := fit.fault("teacher"):
        expected = f"settings that train the teacher; with seed {seed} {fault}"
        raise BadInput("optimizer", run.config.optimizer.name, expected)


def teacher_epochs(run: Session) -> int | None:
    """Epochs of all teachers: as given, or those of the first that is finished, otherwise the Trainer's."""
    if run.config.teacher_epochs:
        return int(run.config.teacher_epochs)
    records = (run.out / f"seed{seed}" / "teacher.json" for seed in run.config.seeds)
    found = (FitRecord.read(record).max_epochs for record in records if record.exists())
    return next(filter(None, found), run.config.trainer.init_args["max_epochs"])
