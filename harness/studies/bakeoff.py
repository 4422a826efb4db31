"""The bake-off: for each seed a teacher and its students, then one table of all seeds.

When a finished run is extended its teachers are kept, and those of new seeds train for as many epochs.
"""

import copy
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from lightning.pytorch import Trainer
from torch import nn

from apprentice.errors import BadInput
from harness.runs.callbacks import check_callbacks, check_monitors
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net
from harness.runs.plans import Arm, FitPlan, arms, flags_of, flags_of_teacher, of_teacher
from harness.runs.records import FitRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import (
    BY_TEACHER,
    TAUGHT_BY,
    TEACHER,
    TEACHERS,
    format_teachers,
    is_teacher,
    teacher_row_name,
)
from harness.studies.choices import (
    check_averages,
    check_batch_size,
    check_exact_step,
    check_modules,
    check_net,
    is_from_teacher,
    is_in_file,
    notice_metric_direction,
)
from harness.studies.fits import save_classifier
from harness.studies.side_by_side import Builder, SideBySide, group_by_teachers
from harness.studies.teachers import check_head_only, check_own_settings, note_origins, teacher_epochs
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.training.loop import Loop
from strategies import PipelineStrategy

ZOO = "harness.studies.zoo.list_fitting"  # imported for `zoo`
FROM_TEACHERS = "harness.studies.from_teachers.FromTeachers"  # imported for students of their teachers' weights


class BakeOff(SideBySide):
    """A comparison of students; a subclass says what is built, by `teacher` and `students`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, arms(session.config))
        asks_teacher = any(is_from_teacher(session.config, arm.net) for arm in self.arms.values())
        self.nets_from_teachers: Any = resolve_name(FROM_TEACHERS)(session) if asks_teacher else None
        keys = (key for arm in self.arms.values() for key in arm.teachers)
        self.teachers = list(dict.fromkeys([TEACHER, *keys]))  # the flags that choose them

    @property
    def teacher_rows(self) -> list[str]:
        return list(map(teacher_row_name, self.teachers))

    def teacher(self, seed: int, key: str = TEACHER) -> LitClassifier:
        """Build a seed's teacher that a flag chooses, with its weights if it is loaded."""
        raise NotImplementedError

    def students(self, seed: int, arms: Iterable[Arm], teacher: nn.Module) -> Distillation:
        """Build the module of some students of a teacher."""
        raise NotImplementedError

    def build(self, plan: FitPlan) -> Loop:
        first, folder = plan.arms[0], plan.folder(self.session.out)
        if is_teacher(first.net):
            return self.teacher(plan.seed, first.net)
        if (stand_in := self.kind.stand_in(plan.seed)) is not None:
            return self.students(plan.seed, plan.arms, stand_in)
        loaded = dict[str, nn.Module]()
        for key in first.teachers:  # of a stand-in the file lacks what new students need
            saved = folder / teacher_row_name(key)
            has_weights = not (is_in_file(self.config, key) or self.kind.is_stand_in(saved))
            loaded[key] = load_net(saved, "out") if has_weights else self.teacher(plan.seed, key).net
        teacher = self.kind.merge_teachers(self.session, loaded, first.teachers)
        for net in dict.fromkeys(arm.net for arm in plan.arms if is_from_teacher(self.config, arm.net)):
            self.nets_from_teachers.choose(net, plan.seed, teacher)
        return self.students(plan.seed, plan.arms, teacher)

    def check(self) -> None:
        """Build everything once, before anything is written; `zoo` drops arms that fit no net, with a line each.

        Raises:
            BadInput: something can't be trained.
        """
        session, config = self.session, self.config
        trainer = session.checked_trainer()
        check_head_only(session)
        notice_metric_direction(session)
        check_own_settings(session)
        check_taught(config, self.arms, isinstance(trainer.strategy, PipelineStrategy))
        self.kind.check()
        for key in self.teachers if self.kind.stand_in(config.seeds[0]) is None else []:
            with self.kind.data_of_teacher(session, key):
                check_net(session, key, trainer, trained=not self.kind.has_trained_teacher(session, key))
        for net in dict.fromkeys(arm.net for arm in self.arms.values() if not is_from_teacher(config, arm.net)):
            check_net(session, net, trainer)
        teachers = self._check_teachers(trainer)
        build = partial(self._check_students, trainer, teachers)
        if config.zoo:
            names = resolve_name(ZOO)(config, session.parser, self.arms, build)
            self.arms = {name: self.arms[name] for name in names}
        students = build(self.arms)
        check_averages(session, trainer)
        for students_of_one in students:
            check_monitors(session, trainer, students_of_one)
        trained = {key: module for key, module in teachers.items() if not self.kind.has_trained_teacher(session, key)}
        stages: dict[str, Loop] = {teacher_row_name(key): module for key, module in trained.items()}
        check_callbacks(session, trainer, {**stages, "students": students[0]})

    def _check_teachers(self, trainer: Trainer) -> dict[str, LitClassifier]:
        """Build the first seed's teachers, by the flags that choose them; BadInput if one can't be trained."""
        session, config, (first, *others) = self.session, self.config, self.config.seeds
        with self.kind.data_of_teacher(session):
            for seed in others if "{seed}" in (config.teacher_ckpt or "") else ():
                note_origins(session, self.teacher(seed).net, seed, self.kind.teacher_source(seed))
        teachers = dict[str, LitClassifier]()
        for key in self.teachers:
            with self.kind.data_of_teacher(session, key):
                teachers[key] = self.teacher(first, key)
        note_origins(session, teachers[TEACHER].net, first, self.kind.teacher_source(first))
        session.origins |= self.kind.origins(session)
        for key, module in teachers.items():  # before it is frozen
            if self.kind.has_trained_teacher(session, key):
                continue
            with (
                flags_of_teacher(config),
                self.kind.data_of_teacher(session, key),
                session.batches_of(config.teacher_batch_size),
            ):
                session.data.check_replicas(session.replicas(trainer), config.exact)
                module.optimization.check(module, *_count_steps(session, trainer, config.teacher_epochs))
                check_batch_size(session, module)
                check_exact_step(session, trainer, module)
        return teachers

    def _check_students(
        self, trainer: Trainer, teachers: Mapping[str, LitClassifier], names: Iterable[str]
    ) -> list[Distillation]:
        """Build the first seed's students of these names, a module for each choice of teachers; or raise BadInput."""
        session, built = self.session, []
        with flags_of(self.arms.values()):
            for group in group_by_teachers([self.arms[name] for name in names]):
                shares = group[0].teachers
                loaded = {key: copy.deepcopy(teachers[key].net) for key in shares}
                teacher = self.kind.merge_teachers(session, loaded, shares)
                students = self.students(self.config.seeds[0], group, teacher)
                check_modules(session, trainer, *(teachers[key] for key in shares), students)
                students.check_data(session.data)
                students.check_batch(min(session.data.batch_size, session.data.sizes["train"]))
                students.optimization.check(students, *_count_steps(session, trainer))
                check_batch_size(session, students)
                check_exact_step(session, trainer, students)
                built.append(students)
        return built

    def builder(self, seed: int) -> Builder:
        teacher = self.teacher(seed)
        return lambda arms: self.students(seed, arms, teacher.net)

    def before_seed(self, seed: int) -> None:
        self.kind.before_seed(seed)

    def after_seed(self, seed: int) -> None:
        self.kind.after_seed(seed)
        if self.config.save_ckpt and is_main_process():
            for key in self.teachers:
                with self.kind.data_of_teacher(self.session, key):
                    save_classifier(self.session, seed, teacher_row_name(key))
            for name in self.arms:
                save_classifier(self.session, seed, name)

    def fit(self, plan: FitPlan, plans: Sequence[FitPlan] = ()) -> FitRecord:
        """Train what is planned, unless that is done; BadInput for settings by which the teacher fails."""
        key = plan.arms[0].net
        of_teacher_alone = is_teacher(key)
        with self.kind.data_of_teacher(self.session, key) if of_teacher_alone else nullcontext():
            record = super().fit(plan, plans)
        if of_teacher_alone and (fault := record.fault(plan.name)):
            expected = f"settings that train the {plan.name}; with seed {plan.seed} {fault}"
            with flags_of_teacher(self.config):
                raise BadInput("optimizer", of_teacher(self.config).optimizer.name, expected)
        return record

    def teacher_plans(self, seed: int) -> list[FitPlan]:
        return [self.teacher_plan(seed, key) for key in self.teachers]

    def teacher_plan(self, seed: int, key: str = TEACHER) -> FitPlan:
        is_trained, arm = self.kind.has_trained_teacher(self.session, key), Arm(teacher_row_name(key), key)
        epochs = None if is_trained else teacher_epochs(self.session, key)
        batch_size, tested = self.config.teacher_batch_size, True
        if is_in_file(self.config, key):
            tested = "test" in cast("Any", self.teacher(seed, key).net).parts
        return FitPlan(
            seed, arm.name, (arm,), epochs, is_trained, tested=tested, batch_size=batch_size, all_labels=True
        )

    def check_peers_train_together(self, arms: Sequence[Arm]) -> None:
        names = {arm.name for arm in arms}
        for arm in arms:
            if earlier := [peer for peer in arm.objective(self.config).peers if peer not in names]:
                expected = f"students that begin with it; {earlier[0]} was trained before: take another `out`"
                raise BadInput(f"variants.{arm.name}.peers", earlier[0], expected)


def check_taught(config: Namespace, arms: Mapping[str, Arm], is_pipeline: bool) -> None:
    """Raise BadInput for teachers that teach nobody, and students that can't learn from those that they have."""
    used = {key for arm in arms.values() for key in arm.teachers}
    for name, choice in vars(config).get(TEACHERS, {}).items():
        if f"{TEACHERS}.{name}" not in used:
            raise BadInput(f"{TEACHERS}.{name}", choice.name, f"a student that it teaches: `{TAUGHT_BY}.ROW {name}`")
    for arm in arms.values():
        objective = arm.objective(config)
        if len(arm.teachers) > 1 and is_pipeline:
            why = "one teacher under a pipeline, which can't cut the mean of several"
            raise BadInput(f"{TAUGHT_BY}.{arm.name}", format_teachers(arm.teachers), why)
        if arm.teachers != BY_TEACHER and not objective.uses_teacher:
            why = f"a method that asks a teacher; {arm.method.name} learns without"
            raise BadInput(f"{TAUGHT_BY}.{arm.name}", format_teachers(arm.teachers), why)
        for peer in objective.peers:
            if peer in arms and arms[peer].teachers != arm.teachers:
                expected = f"students with the same teachers, by `{TAUGHT_BY}`"
                raise BadInput(f"variants.{arm.variant}.peers", peer, expected)


def _count_steps(session: Session, trainer: Trainer, epochs: int | None = None) -> tuple[float, int]:
    """Count the optimizer's steps in a fit of so many epochs and in one epoch.

    By default they are the Trainer's epochs, of which -1 is no limit.
    """
    options = session.config.trainer.init_args
    steps_per_epoch = math.ceil(session.data.train_batches(trainer) / options["accumulate_grad_batches"])
    limits = [steps_per_epoch * (epochs or options["max_epochs"] or -1), options["max_steps"]]
    return min((steps for steps in limits if steps >= 0), default=math.inf), steps_per_epoch
