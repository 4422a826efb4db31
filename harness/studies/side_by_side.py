"""Arms trained side by side: for each seed all of them in one pass over the data, then one table of all seeds.

A finished run may grow: arms that are added train in a fit of their own, `students-2` and so on, as an arm is the same
alone and in company.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from harness.reports.bakeoff.save import save_results
from harness.reports.bakeoff.texts import text
from harness.reports.combine import combine
from harness.reports.html import Section
from harness.reports.results import Results
from harness.reports.search import Search
from harness.runs import environment, safepoints
from harness.runs.launch import is_main_process, main_first
from harness.runs.plans import Arm, FitOutcome, FitPlan, teams
from harness.runs.records import FitRecord, NetRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import BY_TEACHER, TEACHER, format_teachers
from harness.runs.tensorboard import log_means
from harness.studies import costs
from harness.studies.choices import judged_by
from harness.studies.fits import fit
from harness.studies.kinds import kind_of
from harness.studies.launcher import find_launcher, without_jobs
from harness.studies.next_steps import best_student, next_steps
from lit_modules.training.loop import Loop

TUNING = "harness.studies.tuning.halving.Tuning"  # imported where there is a search
Builder = Callable[[Sequence[Arm]], Loop]  # makes the module of some arms


class SideBySide:
    """A comparison of arms; a subclass says what is built.

    `arms` are the arms by name, those of `only`; after `check` under `zoo`, those that fit; in the end
    those with the best settings of a search.
    """

    keeps_checkpoints: ClassVar[bool] = True  # from which a fit goes on, if it gets more epochs

    def __init__(self, session: Session, arms: Mapping[str, Arm]) -> None:
        self.session, self.arms = session, dict(arms)
        self.kind = kind_of(session, self.arms.values())
        self.launcher = find_launcher(session)
        self.tuning: Any = None  # the search for the arms' settings, after `prepare`
        self.failed: dict[str, str] = {}  # of the first seed, where losses were not finite; in the main process alone

    @property
    def config(self) -> Namespace:
        return self.session.config

    @property
    def teacher_rows(self) -> list[str]:
        """The rows of the table above those of the arms."""
        return []

    def build(self, plan: FitPlan) -> Loop:
        """Build the module of a fit."""
        raise NotImplementedError

    def builder(self, seed: int) -> Builder:
        """Return what builds the module of some arms of a seed, for a search, whose teacher may be a new net."""
        raise NotImplementedError

    def teacher_plans(self, seed: int) -> list[FitPlan]:
        """Plan a seed's fits before those of the arms."""
        return []

    def before_seed(self, seed: int) -> None:
        """Prepare a seed's folder, in all processes in turn."""

    def after_seed(self, seed: int) -> None:
        """Keep what a seed's fits have left."""

    def check(self) -> None:
        """Build everything once; BadInput if something can't be trained."""
        raise NotImplementedError

    def prepare(self) -> Self:
        """Check everything, and the search of `tune`; BadInput if something can't be trained."""
        self.check()
        if self.config.tune:
            self.tuning = resolve_name(TUNING)(self)
            self.tuning.check()
        return self

    def check_peers_train_together(self, arms: Sequence[Arm]) -> None:
        """Raise BadInput if arms can't train in one fit."""

    def measure(self, plan: FitPlan, module: Loop, arm: Arm, run: str, outcome: FitOutcome) -> NetRecord:
        """Measure an arm's scores and costs after its fit, and what its kind of data adds; `run` is its run there."""
        record = costs.measure(module, arm, run, outcome, self.session.data, self.kind.count_training)
        return self.kind.add_figures(self.session, plan, arm, module.net_of(run), outcome, record)

    def sections(self, results: Results) -> list[Section]:
        """Return sections of report.html beside those of any comparison."""
        return self.kind.sections(self.session, results)

    def run(self) -> None:
        """Search for settings if that is asked for; train and test the arms for each seed; print and save the table."""
        search: Search | None = None
        if self.tuning is not None:
            self.arms = self.tuning.search()
            search = self.tuning.facts()
        seeds, names = self.config.seeds, [*self.teacher_rows, *self.arms]
        with main_first("students"):
            for seed in seeds:
                self.before_seed(seed)
            plans = {seed: self.plans(seed) for seed in seeds}
        of_run = [plan for of_seed in plans.values() for plan in of_seed]
        log_means(self.session, names)
        self.launch(of_run)
        records: dict[int, list[FitRecord]] = {}
        for seed in seeds:
            records[seed] = [self.fit(plan, of_run) for plan in plans[seed]]
            self.after_seed(seed)
        if is_main_process():  # other ranks have no records
            of_first = {name: net for record in records[seeds[0]] for name, net in record.nets.items()}
            self.failed = {name: str(of_first[name].failed) for name in self.arms if of_first[name].failed}
            log_means(self.session, names)
            self._report(list(records.values()), search)

    def launch(self, plans: Sequence[FitPlan]) -> None:
        """With `launcher`, run the fits that are not finished as jobs; `fit` then has their records."""
        if self.launcher is not None:
            self.launcher.run(self.session, type(self), plans)

    def fit(self, plan: FitPlan, plans: Sequence[FitPlan] = ()) -> FitRecord:
        """Train what is planned, unless that is done."""
        with without_jobs(self.session, plan), self.session.batches_of(plan.batch_size):
            return fit(self.session, plan, self.build, plans, self.measure)

    def plans(self, seed: int) -> list[FitPlan]:
        """Plan a seed's fits: those before the arms', those of arms that the folder has, and one of arms that are new.

        Raises:
            BadInput: an arm learns from one that was trained before it.
        """
        plans = self.teacher_plans(seed)
        folder = self.session.out / f"seed{seed}"
        epochs = self.config.trainer.init_args["max_epochs"]
        members = {path.stem: {*_list_members(folder, path.stem)} for path in sorted(folder.glob("students*.[cj]*"))}
        members = {name: names for name, names in members.items() if names}
        new = {name: arm for name, arm in self.arms.items() if not any(name in names for names in members.values())}
        new_fits = self._divide(new)
        for name in itertools.chain(["students"], (f"students-{number}" for number in itertools.count(2))):
            if not new_fits and not members:
                return plans
            if name in members:
                names = members.pop(name)
                chosen = tuple(arm for arm in self.arms.values() if arm.name in names)
            else:
                chosen = new_fits.pop(0) if new_fits else ()
            if chosen:
                self.check_peers_train_together(chosen)
                plans.append(FitPlan(seed, name, chosen, epochs, keeps_checkpoint=self.keeps_checkpoints))
        raise AssertionError("there are always more names")

    def _divide(self, new: Mapping[str, Arm]) -> list[tuple[Arm, ...]]:
        """Divide arms that have no fit yet into fits: those of other teachers, and by `launcher.students`.

        Arms of a team share one.
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

    def combine(self, records: Sequence[Sequence[FitRecord]]) -> Results:
        """Combine for each seed the records of its fits: those of its teachers, then those of the arms."""
        count = len(self.teacher_rows)
        teachers = {row: [fits[number] for fits in records] for number, row in enumerate(self.teacher_rows)}
        students = [fits[count:] for fits in records]
        nets = [{name: net for fit in fits for name, net in fit.nets.items()} for fits in students]
        others = {name: arm for name, arm in self.arms.items() if arm.teachers != BY_TEACHER}
        return combine(
            self.session.header(),
            teachers.pop(TEACHER, []),
            {name: [of_seed[name] for of_seed in nets] for name in self.arms},
            [sum(fit.fit_seconds or 0.0 for fit in fits) for fits in students],
            judged_by(self.config, self.session.data),
            variants={name: arm.variant or name for name, arm in self.arms.items()},
            taught={name: format_teachers(arm.teachers) for name, arm in others.items()},
            more_teachers=teachers,
        )

    def _report(self, records: Sequence[Sequence[FitRecord]], search: Search | None) -> None:
        """Print and save the table, given for each seed the records of its fits."""
        session, data = self.session, self.session.data
        results = self.combine(records)
        results.classes, results.search, out = list(data.class_names), search, session.out
        save_results(out, results, data.test_images, environment.commands(out), self.sections(results))
        print(f"{text(results)}\n\n{next_steps(session, self.kind, best_student(results))}")


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


def _list_members(folder: Path, fit: str) -> Iterator[str]:
    """Yield the students in the record of a fit or, if it is not finished, in its checkpoint."""
    record, checkpoint = folder / f"{fit}.json", folder / f"{fit}.ckpt"
    if record.exists():
        yield from FitRecord.read(record).nets
    elif checkpoint.exists():
        keys = safepoints.read(checkpoint)["state_dict"]
        yield from (key.split(".")[1] for key in keys if key.startswith("students."))
