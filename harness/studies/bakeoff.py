"""The bake-off: for each seed a teacher and its students, then one table of all seeds.

A finished run may grow: students that are added train in a fit of their own, `students-2` and so on, as a student is
the same alone and in company. Teachers are kept, and teachers of new seeds have as many epochs.
"""

import copy
import itertools
import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from lightning.pytorch import Trainer
from torch import nn

from apprentice.errors import BadInput
from harness.reports.interactive import save_results
from harness.reports.pages import text
from harness.reports.results import Search, combine
from harness.runs import environment, safepoints
from harness.runs.callbacks import check_callbacks, check_monitors
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import load_net
from harness.runs.plans import Arm, FitPlan, arms, flags_of, flags_of_teacher, of_teacher, teams
from harness.runs.records import FitRecord
from harness.runs.session import Session
from harness.runs.taught import BY_TEACHER, TAUGHT_BY, TEACHER, TEACHERS, Shares, describe, is_teacher, row_of
from harness.runs.tensorboard import log_means
from harness.studies import zoo
from harness.studies.answers import check_answers, read_answers
from harness.studies.choices import (
    check_averages,
    check_batch_size,
    check_modules,
    check_net,
    is_pruned,
    judged_by,
    tell_direction,
)
from harness.studies.fits import fit, is_finished, save_classifier
from harness.studies.launched import build_launcher, do_work, run_jobs, without_jobs
from harness.studies.pruning import Pruning
from harness.studies.stored import StoredOutputs, is_stand_in
from harness.studies.teachers import check_head_only, check_own_settings, has_trained_teacher, teacher_epochs
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.learner import Learner
from lit_modules.nets import Ensemble
from strategies import PipelineStrategy


class BakeOff:
    """A comparison of students; a subclass says what is built, by `teacher` and `students`.

    `arms` are the students by name, those of `--only`; after `check` under `--zoo`, those that fit the nets.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.arms = arms(session.config)
        self.launcher = build_launcher(session)
        self.pruning, self.stored = Pruning(session), StoredOutputs(session, self.arms.values())
        keys = (key for arm in self.arms.values() for key in arm.teachers)
        self.teachers = list(dict.fromkeys([TEACHER, *keys]))  # the flags that choose them
        self.failed: dict[str, str] = {}  # of the first seed, where losses were not finite; in the main process alone

    @property
    def config(self) -> Namespace:
        return self.session.config

    def teacher(self, seed: int, key: str = TEACHER) -> LitClassifier:
        """Build a seed's teacher that a flag chooses, with its weights if it is loaded."""
        raise NotImplementedError

    def students(self, seed: int, arms: Iterable[Arm], teacher: nn.Module) -> Distillation:
        """Build the module of some students of a teacher."""
        raise NotImplementedError

    def build(self, plan: FitPlan) -> Learner:
        first, folder = plan.arms[0], plan.folder(self.session.out)
        if is_teacher(first.net):
            return self.teacher(plan.seed, first.net)
        if (stored := self.stored.net(plan.seed)) is not None:
            return self.students(plan.seed, plan.arms, stored)
        loaded = dict[str, nn.Module]()
        for key in first.teachers:  # of a stand-in the file lacks what new students need
            saved = folder / row_of(key)
            loaded[key] = self.teacher(plan.seed, key).net if is_stand_in(saved) else load_net(saved, "out")
        teacher = merge_teachers(loaded, first.teachers)
        for net in dict.fromkeys(arm.net for arm in plan.arms if is_pruned(self.config, arm.net)):
            self.pruning.choose(net, plan.seed, teacher)
        return self.students(plan.seed, plan.arms, teacher)

    def check(self) -> None:
        """Build everything once; under `--zoo`, leave out arms that do not fit the nets, with a line that says why.

        Raises:
            BadInput: something can't be trained.
        """
        session, config, (first, *others) = self.session, self.config, self.config.seeds
        trainer = session.checked_trainer()
        check_head_only(session)
        tell_direction(session)
        check_own_settings(session)
        check_answers(session)
        check_taught(config, self.arms, isinstance(trainer.strategy, PipelineStrategy))
        self.stored.check()
        for key in self.teachers if self.stored.net(first) is None else []:
            with session.tokens_of_teacher():
                check_net(session, key, trainer, trained=not has_trained_teacher(session, key))
        for net in dict.fromkeys(arm.net for arm in self.arms.values() if not is_pruned(config, arm.net)):
            check_net(session, net, trainer)
        with session.tokens_of_teacher():
            for seed in others if "{seed}" in (config.teacher_ckpt or "") else ():
                self.teacher(seed)
            teachers = {key: self.teacher(first, key) for key in self.teachers}
        trained = {key: module for key, module in teachers.items() if not has_trained_teacher(session, key)}
        for module in trained.values():  # before it is frozen
            with (
                flags_of_teacher(config),
                session.tokens_of_teacher(),
                session.batches_of(config.teacher_batch_size),
            ):
                session.data.check_replicas(session.replicas(trainer), config.exact)
                module.check_optimizer(*_count_steps(session, trainer, config.teacher_epochs))
                check_batch_size(session, module)

        def build(names: Iterable[str]) -> list[Distillation]:
            built = []
            with flags_of(self.arms.values()):
                for group in group_by_teachers([self.arms[name] for name in names]):
                    shares = group[0].teachers
                    loaded = {key: copy.deepcopy(teachers[key].net) for key in shares}
                    students = self.students(first, group, merge_teachers(loaded, shares))
                    check_modules(session, trainer, *(teachers[key] for key in shares), students)
                    students.check_data(session.data)
                    students.check_batch(min(session.data.batch_size, session.data.sizes["train"]))
                    if session.data.packs_texts:
                        students.check_packed()
                    students.check_optimizer(*_count_steps(session, trainer))
                    built.append(students)
            return built

        if config.zoo:
            names = zoo.list_fitting(config, session.parser, self.arms, build)
            self.arms = {name: self.arms[name] for name in names}
        students = build(self.arms)
        stages: dict[str, Learner] = {row_of(key): module for key, module in trained.items()}
        check_batch_size(session, *students)
        check_averages(session, trainer)
        for students_of_one in students:
            check_monitors(session, trainer, students_of_one)
        check_callbacks(session, trainer, {**stages, "students": students[0]})

    def run(self, search: Search | None = None) -> None:
        """Train and test teacher and students for each seed, then print and save the table, and what a search found."""
        seeds, names = self.config.seeds, [*map(row_of, self.teachers), *self.arms]
        with main_first("students"):
            for seed in seeds:
                self.stored.take_record(seed)
            plans = {seed: self.plans(seed) for seed in seeds}
        of_run = [plan for of_seed in plans.values() for plan in of_seed]
        log_means(self.session, names)
        self.launch(of_run)
        records: dict[int, list[FitRecord]] = {}
        for seed in seeds:
            records[seed] = [self.fit(plan, of_run) for plan in plans[seed]]
            self.stored.keep_record(seed)
            if self.config.save_ckpt and is_main_process():
                for name in names:
                    save_classifier(self.session, seed, name)
        if is_main_process():  # other ranks have no records
            of_first = {name: net for record in records[seeds[0]] for name, net in record.nets.items()}
            self.failed = {name: str(of_first[name].failed) for name in self.arms if of_first[name].failed}
            log_means(self.session, names)
            self._report(list(records.values()), search)

    def launch(self, plans: Iterable[FitPlan]) -> None:
        """With `--launcher`, run the fits that are not finished as jobs; `fit` then has their records."""
        if self.launcher is not None:
            missing = [plan for plan in plans if not is_finished(self.session, plan)]
            run_jobs(self.session, self.launcher, type(self), missing)

    def do_job(self) -> None:
        """Fit what this process is to, as a job of a launcher."""

        def work(session: Session, plan: FitPlan) -> None:
            self.session = session
            self.fit(plan)

        do_work(self.session, work)

    def fit(self, plan: FitPlan, plans: Sequence[FitPlan] = ()) -> FitRecord:
        """Train what is planned, unless that is done; BadInput for settings by which the teacher fails."""
        of_teacher_alone = is_teacher(plan.arms[0].net)
        tokens = self.session.tokens_of_teacher() if of_teacher_alone else nullcontext()
        with without_jobs(self.session, plan), tokens, self.session.batches_of(plan.batch_size):
            record = fit(self.session, plan, self.build, plans)
        if of_teacher_alone and (fault := record.fault(plan.name)):
            expected = f"settings that train the {plan.name}; with seed {plan.seed} {fault}"
            with flags_of_teacher(self.config):
                raise BadInput("optimizer", of_teacher(self.config).optimizer.name, expected)
        return record

    def plans(self, seed: int) -> list[FitPlan]:
        """Plan a seed's fits: the teacher's, those of students that the folder has, and one of students that are new.

        Raises:
            BadInput: a student learns from one that was trained before it.
        """
        plans = [self.teacher_plan(seed, key) for key in self.teachers]
        folder = self.session.out / f"seed{seed}"
        epochs = self.config.trainer.init_args["max_epochs"]
        members = {path.stem: {*_list_members(folder, path.stem)} for path in sorted(folder.glob("students*.[cj]*"))}
        members = {name: names for name, names in members.items() if names}
        new = {name: arm for name, arm in self.arms.items() if not any(name in names for names in members.values())}
        waves = self._divide(new)
        for name in itertools.chain(["students"], (f"students-{number}" for number in itertools.count(2))):
            if not waves and not members:
                return plans
            if name in members:
                names = members.pop(name)
                chosen = tuple(arm for arm in self.arms.values() if arm.name in names)
            else:
                chosen = waves.pop(0) if waves else ()
            if chosen:
                self._check_peers(chosen)
                plans.append(FitPlan(seed, name, chosen, epochs, keeps_checkpoint=True))
        raise AssertionError("there are always more names")

    def _divide(self, new: Mapping[str, Arm]) -> list[tuple[Arm, ...]]:
        """Divide students that have no fit yet into fits: those of other teachers, and by `--launcher.students`.

        Students of a team share one.
        """
        most = self.launcher.students if self.launcher else None
        fits: list[tuple[Arm, ...]] = []
        for group in group_by_teachers(new.values()):
            if most is None:
                fits.append(tuple(group))
                continue
            of_group: list[tuple[Arm, ...]] = []
            for team in teams(group, self.config):
                if of_group and len(of_group[-1]) + len(team) <= most:
                    of_group[-1] += team
                else:
                    of_group.append(team)
            fits += of_group
        return fits

    def teacher_plan(self, seed: int, key: str = TEACHER) -> FitPlan:
        is_trained, arm = has_trained_teacher(self.session, key), Arm(row_of(key), key)
        epochs = None if is_trained else teacher_epochs(self.session, key)
        batch_size = self.config.teacher_batch_size
        return FitPlan(seed, arm.name, (arm,), epochs, is_trained, batch_size=batch_size, all_labels=True)

    def _check_peers(self, arms: Sequence[Arm]) -> None:
        names = {arm.name for arm in arms}
        for arm in arms:
            if earlier := [peer for peer in arm.objective(self.config).peers if peer not in names]:
                expected = f"students that begin with it; {earlier[0]} was trained before: take another --out"
                raise BadInput(f"variants.{arm.name}.peers", earlier[0], expected)

    def _report(self, records: Sequence[Sequence[FitRecord]], search: Search | None) -> None:
        """Print and save the table, given for each seed the records of the teachers and of the students' fits."""
        session, config, data = self.session, self.config, self.session.data
        rows = [row_of(key) for key in self.teachers]
        teachers, *others = ([fits[number] for fits in records] for number in range(len(rows)))
        students = [fits[len(rows) :] for fits in records]
        nets = [{name: net for fit in fits for name, net in fit.nets.items()} for fits in students]
        results = combine(
            session.header(),
            teachers,
            {name: [of_seed[name] for of_seed in nets] for name in self.arms},
            [sum(fit.fit_seconds or 0.0 for fit in fits) for fits in students],
            judged_by(config, data),
            variants={name: arm.variant for name, arm in self.arms.items()},
            taught={name: describe(arm.teachers) for name, arm in self.arms.items() if arm.teachers != BY_TEACHER},
            more_teachers=dict(zip(rows[1:], others, strict=True)),
        )
        results.classes, results.search, out = list(data.class_names), search, session.out
        answers = read_answers(out / f"seed{results.seeds[0]}", results.nets)
        save_results(out, results, data.test_images, environment.commands(out), answers)
        print(f"{text(results)}\n\n{out}/report.html, results.md, .png, .json; curves: tensorboard --logdir {out}")


def merge_teachers(loaded: Mapping[str, nn.Module], shares: Shares) -> nn.Module:
    """Return the one teacher, or the weighted mean of several."""
    return Ensemble([*loaded.values()], [*shares.values()]) if len(loaded) > 1 else next(iter(loaded.values()))


def group_by_teachers(arms: Iterable[Arm]) -> list[list[Arm]]:
    """Split arms into those that have the same teachers with the same weights, in their order."""
    groups: list[list[Arm]] = []
    for arm in arms:
        group = next((group for group in groups if group[0].teachers == arm.teachers), None)
        if group is None:
            groups.append([arm])
        else:
            group.append(arm)
    return groups


def check_taught(config: Namespace, arms: Mapping[str, Arm], is_pipeline: bool) -> None:
    """Raise BadInput for teachers that teach nobody, and students that can't learn from those that they have."""
    used = {key for arm in arms.values() for key in arm.teachers}
    for name, choice in vars(config).get(TEACHERS, {}).items():
        if f"{TEACHERS}.{name}" not in used:
            raise BadInput(f"{TEACHERS}.{name}", choice.name, f"a student that it teaches: --{TAUGHT_BY}.ROW {name}")
    for arm in arms.values():
        objective = arm.objective(config)
        if len(arm.teachers) > 1 and is_pipeline:
            why = "one teacher under a pipeline, which can't cut the mean of several"
            raise BadInput(f"{TAUGHT_BY}.{arm.name}", describe(arm.teachers), why)
        if arm.teachers != BY_TEACHER and not objective.uses_teacher:
            why = f"a method that asks a teacher; {arm.method.name} learns without"
            raise BadInput(f"{TAUGHT_BY}.{arm.name}", describe(arm.teachers), why)
        for peer in objective.peers:
            if peer in arms and arms[peer].teachers != arm.teachers:
                expected = f"students with the same teachers, by --{TAUGHT_BY}"
                raise BadInput(f"variants.{arm.variant}.peers", peer, expected)


def _count_steps(session: Session, trainer: Trainer, epochs: int | None = None) -> tuple[float, int]:
    """Count the optimizer's steps in a fit of so many epochs and in one epoch.

    By default they are the Trainer's epochs, of which -1 is no limit.
    """
    options = session.config.trainer.init_args
    steps_per_epoch = math.ceil(session.data.train_batches(trainer) / options["accumulate_grad_batches"])
    limits = [steps_per_epoch * (epochs or options["max_epochs"] or -1), options["max_steps"]]
    return min((steps for steps in limits if steps >= 0), default=math.inf), steps_per_epoch


def _list_members(folder: Path, fit: str) -> Iterator[str]:
    """Yield the students in the record of a fit or, if it is not finished, in its checkpoint."""
    record, checkpoint = folder / f"{fit}.json", folder / f"{fit}.ckpt"
    if record.exists():
        yield from FitRecord.read(record).nets
    elif checkpoint.exists():
        keys = safepoints.read(checkpoint)["state_dict"]
        yield from (key.split(".")[1] for key in keys if key.startswith("students."))
