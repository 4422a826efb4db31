"""Equal tuning: the same number of settings of each method, trained side by side, by successive halving.

Every setting is a student of one pass over the data for each tuning seed. Fits end at the rungs; the checkpoint of one,
without the students that are dropped, is where the next begins. Nothing here reads a test sample.
"""

import copy
import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn

from apprentice.errors import BadInput
from harness.cli.classes import Choice
from harness.reports.search import Cost, Search, Setting, Tuned
from harness.runs.files import read_text, write_json
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import load_net
from harness.runs.quiet import notice
from harness.runs.records import FitRecord, NetRecord, reading
from harness.runs.session import Session
from harness.studies.distillation import MakeStudents, MakeTeacher, check_teacher, has_trained_teacher, teacher_epochs
from harness.studies.fits import Candidate, judged_by, train
from harness.studies.setups import Setup, trial_name
from harness.studies.tuning import rungs, spaces
from harness.studies.tuning.waves import in_waves
from lit_modules.distillation import Distillation
from lit_modules.tasks import Metric

FOLDER, PLAN = "tuning", "plan.json"
Trials = Mapping[str, Sequence[Setup]]  # of each row


class Tuning:
    """The search of a study's settings.

    Args:
        run: the study's session, in its folder.
        make_teacher: makes a seed's teacher.
        make_students: makes some students of a teacher.
        setups: the rows that are tuned, as they were given.
    """

    def __init__(
        self, run: Session, make_teacher: MakeTeacher, make_students: MakeStudents, setups: Mapping[str, Setup]
    ) -> None:
        self.make_teacher, self.make_students = make_teacher, make_students
        self.run, self.setups, self.metric = _inside(run), setups, judged_by(run.config, run.data)
        self.trials = trials(run, setups)
        self.teams = _teams(run.config, setups)
        self.ends = rungs.ends(run.config.trainer.init_args["max_epochs"])

    def chosen(self) -> dict[str, Setup]:
        """Train all settings, as far as each goes; of each row the best one, to be trained afresh."""
        self.best = {name: kept for name, (kept,) in self.searched().items()}
        with main_first("tuned"):
            for checkpoint in self.run.out.glob("seed*/*.ckpt") if is_main_process() else ():
                checkpoint.unlink()
        return {name: self.trials[name][trial]._replace(trial=None) for name, trial in self.best.items()}

    def searched(self) -> dict[str, list[int]]:
        """Train all settings, as far as each goes; of each row the number of the best one."""
        waves = self._waves()
        for seed in self.run.config.seeds:
            self._teach(seed)
        alive = {name: list(range(len(found))) for name, found in self.trials.items()}
        for rung, end in enumerate(self.ends, 1):
            for seed in self.run.config.seeds:
                for wave, names in enumerate(waves, 1):
                    self._fit(seed, rung, wave, names, alive)
            found = self._scores(rung, waves)
            for team in self.teams:
                scores = {trial: _mean([found[trial_name(name, trial)] for name in team]) for trial in alive[team[0]]}
                kept = rungs.best(scores, self.metric, 1 if end == self.ends[-1] else math.ceil(len(scores) / 2))
                alive |= dict.fromkeys(team, kept)
        return alive

    def facts(self) -> Search:
        """What results.json has of it, after `chosen`."""
        records = [self._records(seed) for seed in self.run.config.seeds]
        methods: dict[str, Tuned] = {}
        for row, trials_of in self.trials.items():
            searched = spaces.spaces(self.run.config, self.setups[row])
            settings = []
            for trial in trials_of:
                last = [each[trial.name] for each in records]
                options = spaces.options(self.run.config, trial, searched)
                scores = [rungs.score(net, self.metric) for net in last]
                settings.append(Setting(options, scores, max(len(net.epochs) for net in last)))
            methods[row] = Tuned(settings, self.best[row])
        return Search(methods, self._cost(), self.ends)

    def _cost(self) -> Cost:
        """Epochs of each row's students, and of the seeds' teachers, unless they were loaded.

        Also samples that teachers computed for students, and would have for each setting by itself: outputs that are
        stored once for all its epochs, while the search stores them again at each rung.
        """
        epochs, asked, alone, seconds = dict.fromkeys(self.setups, 0), 0, 0, 0.0
        teachers = [FitRecord.read(self.run.out / f"seed{seed}" / "teacher.json") for seed in self.run.config.seeds]
        asks = {name: setup.objective(self.run.config).uses_teacher for name, setup in self.setups.items()}
        row_of = {trial.name: row for row, found in self.trials.items() for trial in found}
        for seed in self.run.config.seeds:
            done: dict[str, int] = {}
            stored: set[str] = set()  # settings whose teacher's outputs are
            for path in self._fits(seed):
                record = FitRecord.read(path)
                users = {name for name in record.nets if asks[row_of[name]]} - stored
                asked += record.teacher_samples or 0
                alone += (record.teacher_samples or 0) * len(users)
                stored |= users if record.teacher_stored else set()
                seconds += record.fit_seconds or 0.0
                done |= {name: len(net.epochs) for name, net in record.nets.items()}
            for name, count in done.items():
                epochs[row_of[name]] += count
        teacher_epochs = sum(teacher.max_epochs or 0 for teacher in teachers)
        teacher_seconds = sum(teacher.fit_seconds or 0.0 for teacher in teachers)
        return Cost(epochs, asked, alone, seconds, teacher_epochs, teacher_seconds)

    def _teach(self, seed: int) -> None:
        loaded, epochs = has_trained_teacher(self.run), teacher_epochs(self.run)
        make = partial(self.make_teacher, self.run, seed)
        options: dict[str, Any] = {"trained": loaded, "all_labels": True, "tested": False, "max_epochs": epochs}
        check_teacher(self.run, seed, train(self.run, seed, "teacher", make, **options))

    def _fit(self, seed: int, rung: int, wave: int, names: Sequence[str], alive: Mapping[str, Sequence[int]]) -> None:
        """Train those of a wave that are left until the end of a rung."""
        folder, fit = self.run.out / f"seed{seed}", _fit_name(rung, wave)
        members = self._members(names, alive)
        if not members:
            return
        with main_first(f"seed {seed} {fit}"):
            if rung > 1 and is_main_process():
                before, after = folder / f"{_fit_name(rung - 1, wave)}.ckpt", folder / f"{fit}.ckpt"
                if before.exists() and not (after.exists() or after.with_suffix(".json").exists()):
                    runs = list(FitRecord.read(before.with_suffix(".json")).nets)
                    rungs.carry(before, after, runs, members)
                before.unlink(missing_ok=True)

        def make() -> tuple[Distillation, dict[str, Candidate]]:
            teacher: nn.Module = load_net(folder / "teacher", "out")
            return self.make_students(self.run, seed, teacher, members)

        end = self.ends[rung - 1]
        train(self.run, seed, fit, make, keep=True, tested=False, until=end)

    def _members(self, names: Sequence[str], alive: Mapping[str, Sequence[int]]) -> dict[str, Setup]:
        left = {found[trial].name: found[trial] for row, found in self.trials.items() for trial in alive[row]}
        return {name: left[name] for name in names if name in left}

    def _records(self, seed: int) -> dict[str, NetRecord]:
        """By setting, what the last fit that it was in says of it."""
        found: dict[str, NetRecord] = {}
        for path in self._fits(seed):
            found |= FitRecord.read(path).nets
        return found

    def _fits(self, seed: int) -> list[Path]:
        """The records of a seed's fits, rung after rung."""
        folder = self.run.out / f"seed{seed}"
        return [path for rung in range(1, len(self.ends) + 1) for path in sorted(folder.glob(f"rung{rung}*.json"))]

    def _scores(self, rung: int, waves: Sequence[Sequence[str]]) -> dict[str, float | None]:
        """By setting that has come to this rung, the mean over the tuning seeds; None if it failed with one."""
        found: dict[str, list[float | None]] = {}
        for seed in self.run.config.seeds:
            for wave in range(1, len(waves) + 1):
                path = self.run.out / f"seed{seed}" / f"{_fit_name(rung, wave)}.json"
                for name, net in FitRecord.read(path).nets.items() if path.exists() else ():
                    found.setdefault(name, []).append(rungs.score(net, self.metric))
        return {name: _mean(scores) for name, scores in found.items()}

    def _waves(self) -> list[list[str]]:
        """Which settings train side by side, as the folder has it; those of rows that came later in further waves."""
        with main_first("plan"):
            plan = planned(self.run.out, self.run.config)
            new = _unplanned(plan, self.teams, self.trials)
            if new:
                every = {trial.name: trial for found in self.trials.values() for trial in found}
                plan["tune_wave"] = self.run.config.tune_wave
                plan["waves"] += in_waves(self.run, self.make_teacher, self.make_students, new, every)
                if is_main_process():
                    self.run.out.mkdir(exist_ok=True)
                    write_json(self.run.out / PLAN, plan)
        waves: list[list[str]] = plan["waves"]
        return waves


def planned(folder: Path, config: Namespace) -> dict[str, Any]:
    """The plan that a search's folder has: `epochs`, `tune_wave`, and `waves` of settings.

    It has no waves yet where there is no plan, or one for another `--tune_wave` by which nothing was trained.

    Raises:
        BadInput: it is for another number of epochs.
    """
    path, epochs = folder / PLAN, config.trainer.init_args["max_epochs"]
    plan: dict[str, Any] = {"epochs": epochs, "tune_wave": config.tune_wave, "waves": []}
    if path.exists():
        with reading(path, "out", "the plan of a search"):
            plan |= json.loads(read_text(path))
            _unplanned(plan, [], {})
        if plan["epochs"] != epochs:
            raise BadInput("trainer.max_epochs", epochs, f"{plan['epochs']}, for which settings were searched")
        if plan["tune_wave"] != config.tune_wave and not any(folder.glob("seed*/rung1*")):
            plan["waves"] = []
    return plan


def _unplanned(plan: dict[str, Any], teams: Sequence[Sequence[str]], found: Trials) -> list[list[str]]:
    """The settings that are in no wave of a plan, those of a team together."""
    known = {name for wave in plan["waves"] for name in wave}
    units = [[trial_name(name, trial) for name in team] for team in teams for trial in range(len(found[team[0]]))]
    return [unit for unit in units if not known.issuperset(unit)]


def trials(run: Session, setups: Mapping[str, Setup]) -> dict[str, list[Setup]]:
    """The settings of each row, as many of each row of a team."""
    config, seed = run.config, int(getattr(run.data, "seed", 0) or 0)
    found = {name: spaces.drawn(config, setup, config.tune, seed) for name, setup in setups.items()}
    for team in _teams(config, setups):
        least = min(len(found[name]) for name in team)
        found |= {name: found[name][:least] for name in team}
    return found


def check(run: Session, make_teacher: MakeTeacher, make_students: MakeStudents, setups: Mapping[str, Setup]) -> None:
    """Raise BadInput if the settings can't be searched; build each of them once."""
    config, options = run.config, run.config.trainer.init_args
    epochs, every = options["max_epochs"], options.get("check_val_every_n_epoch", 1)
    if not run.used["validation"]:
        raise BadInput("tune", config.tune, "data with a validation set, such as --data.validation_size 0.1")
    if not epochs or epochs < 0 or options.get("max_steps", -1) != -1:
        expected = "a number of epochs, without --trainer.max_steps: settings are compared at a third and two thirds"
        raise BadInput("trainer.max_epochs", epochs, expected)
    if (limit := options.get("max_time")) is not None:
        expected = "no limit of time: settings are compared after equal epochs"
        raise BadInput("trainer.max_time", limit, expected)
    if not every or every > rungs.ends(epochs)[0]:
        expected = f"at most {rungs.ends(epochs)[0]}, the epochs after which settings are first compared"
        raise BadInput("trainer.check_val_every_n_epoch", "null" if every is None else every, expected)
    if both := sorted({*config.tune_seeds} & {*config.seeds}):
        raise BadInput("tune_seeds", both[0], "a seed that is not in --seeds")
    spaces.check(config, setups)
    found, teams = trials(run, setups), _teams(config, setups)
    if config.resume:
        plan = planned(Path(config.out) / FOLDER, config)
        if plan["tune_wave"] != config.tune_wave and not _unplanned(plan, teams, found):
            before = f"{plan['tune_wave'] or 'no --tune_wave'}, as the search in {config.out} began"
            expected = f"{before}; leave it out, or take another --out"
            raise BadInput("tune_wave", config.tune_wave, expected)
    teacher, _ = make_teacher(run, config.tune_seeds[0])
    for name, settings in found.items():
        if len(settings) < config.tune:
            notice(f"{name}: {len(settings)} settings, as its options have no more")
    for team in teams:
        for of_all in zip(*(found[name] for name in team), strict=True):
            make_students(run, config.tune_seeds[0], teacher.net, {trial.name: trial for trial in of_all})


def _inside(run: Session) -> Session:
    """The session of the search: its own folder and seeds, and no loggers, whose runs would be hundreds."""
    inner = copy.copy(run)
    inner.out = run.out / FOLDER
    trainer: Choice = run.config.trainer
    quiet = Choice(trainer.class_path, {**trainer.init_args, "logger": False})
    inner.config = Namespace(**{**vars(run.config), "seeds": run.config.tune_seeds, "trainer": quiet})
    return inner


def _teams(config: Namespace, setups: Mapping[str, Setup]) -> list[tuple[str, ...]]:
    """The rows, with those that learn from one another in a team, whose settings of one number are tried together."""
    teams: list[set[str]] = []
    for name, setup in setups.items():
        linked = {name, *(peer for peer in setup.objective(config).peers if peer in setups)}
        joined = [team for team in teams if team & linked]
        teams = [team for team in teams if not team & linked] + [set.union(linked, *joined)]
    return [tuple(name for name in setups if name in team) for team in teams]


def _fit_name(rung: int, wave: int) -> str:
    return f"rung{rung}" if wave == 1 else f"rung{rung}-{wave}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) and known else None


def tuned(
    run: Session, make_teacher: MakeTeacher, make_students: MakeStudents, setups: Mapping[str, Setup]
) -> tuple[dict[str, Setup], Search]:
    """The rows with the best settings that a search found, and what results.json has of it."""
    search = Tuning(run, make_teacher, make_students, setups)
    return search.chosen(), search.facts()
