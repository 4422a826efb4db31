"""Equal tuning: the same number of settings of each method, trained side by side, by successive halving.

Every setting is an arm of one pass over the data for each tuning seed. Fits end at the rungs; the checkpoint of one,
without the arms that are dropped, is where the next begins. Nothing here reads a test sample.
"""

import copy
import json
import math
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from apprentice.errors import BadInput
from harness.cli.classes import Choice
from harness.reports.results import mean_of_all
from harness.reports.search import Search, SearchCost, SettingScores, TunedMethod
from harness.runs import safepoints
from harness.runs.files import atomic, read_text, write_json
from harness.runs.launch import is_main_process, main_first
from harness.runs.plans import Arm, FitPlan, teams, trial_name
from harness.runs.quiet import notice
from harness.runs.records import FitRecord, NetRecord, reading
from harness.studies.choices import judged_by
from harness.studies.side_by_side import SideBySide
from harness.studies.teachers import TEACHER
from harness.studies.tuning import spaces
from harness.studies.tuning.waves import in_waves
from lit_modules.tasks import Metric
from lit_modules.training.checkpoints import keep_students

FOLDER, PLAN = "tuning", "plan.json"


class Tuning:
    """The search for the settings of those of a bake-off's arms that learn, as they were given."""

    def __init__(self, bake_off: SideBySide) -> None:
        self.bake_off, self.config = bake_off, bake_off.config
        self.arms = {name: arm for name, arm in bake_off.arms.items() if arm.method.target.learns}
        self.metric = judged_by(self.config, bake_off.session.data)
        self.best: dict[str, int] = {}  # the number of each row's best setting, after `search`

    @cached_property
    def trials(self) -> dict[str, list[Arm]]:
        """The settings of each row, as many of each row of a team."""
        seed = self.bake_off.session.data.seed
        drawn = {name: spaces.draw(self.config, arm, self.config.tune, seed) for name, arm in self.arms.items()}
        least = {name: min(len(drawn[member]) for member in team) for team in self.teams for name in team}
        return {name: trials[: least[name]] for name, trials in drawn.items()}

    @cached_property
    def teams(self) -> list[tuple[str, ...]]:
        """The rows, with those that learn from one another in a team: settings of one number are tried together."""
        return [tuple(arm.row for arm in team) for team in teams(self.arms.values(), self.config)]

    @cached_property
    def ends(self) -> list[int]:
        return rung_ends(self.config.trainer.init_args["max_epochs"])

    @cached_property
    def inner(self) -> SideBySide:
        """The bake-off that trains settings: in its own folder, with its own seeds and without loggers' many runs."""
        outer = self.bake_off.session
        trainer: Choice = self.config.trainer
        quiet = Choice(trainer.class_path, {**trainer.init_args, "logger": False})
        inner = copy.copy(self.bake_off)
        inner.session = outer.with_settings(seeds=self.config.tune_seeds, trainer=quiet)
        inner.session.out = outer.out / FOLDER
        return inner

    @property
    def folders(self) -> dict[int, Path]:
        return {seed: self.inner.session.out / f"seed{seed}" for seed in self.config.tune_seeds}

    def check(self) -> None:
        """Raise BadInput if the settings can't be searched; build each of them once."""
        config, options = self.config, self.config.trainer.init_args
        epochs, every = options["max_epochs"], options.get("check_val_every_n_epoch", 1)
        if not self.arms:
            raise BadInput("tune", config.tune, "a method that learns")
        if not self.bake_off.session.used["validation"]:
            raise BadInput("tune", config.tune, "data with a validation set, such as `data.validation_size 0.1`")
        if not epochs or epochs < 0 or options.get("max_steps", -1) != -1:
            compared = "settings are compared at a third and two thirds"
            expected = f"a number of epochs, without `trainer.max_steps`: {compared}"
            raise BadInput("trainer.max_epochs", epochs, expected)
        if (limit := options.get("max_time")) is not None:
            expected = "not allowed with `tune`, which compares settings after equal epochs"
            raise BadInput("trainer.max_time", limit, expected)
        if not every or every > self.ends[0]:
            expected = f"at most {self.ends[0]}, the epochs after which settings are first compared"
            raise BadInput("trainer.check_val_every_n_epoch", "null" if every is None else every, expected)
        if both := sorted({*config.tune_seeds} & {*config.seeds}):
            raise BadInput("tune_seeds", both[0], "a seed that is not in `seeds`")
        spaces.check(config, self.arms)
        if config.resume:
            plan = load_plan(Path(config.out) / FOLDER, config)
            if plan["tune_wave"] != config.tune_wave and not self._list_unplanned(plan["waves"]):
                before = f"{plan['tune_wave'] or 'no `tune_wave`'}, as the search in {config.out} began"
                expected = f"{before}; leave it out, or take another `out`"
                raise BadInput("tune_wave", config.tune_wave, expected)
        for name, trials in self.trials.items():
            if len(trials) < config.tune:
                notice(f"{name}: {len(trials)} settings, as its options have no more")
        build = self.bake_off.builder(config.tune_seeds[0])
        for team in self.teams:
            for trials_of_team in zip(*(self.trials[name] for name in team), strict=True):
                build(trials_of_team)

    def search(self) -> dict[str, Arm]:
        """Train all settings, as far as each goes; returns the arms, with the best of each, to be trained afresh."""
        self.best = {name: trial for name, (trial,) in self.halve().items()}
        with main_first("tuned"):
            if is_main_process():
                for checkpoint in self.inner.session.out.glob("seed*/*.ckpt"):
                    checkpoint.unlink()
        chosen = {name: replace(self.trials[name][trial], trial=None) for name, trial in self.best.items()}
        return {**self.bake_off.arms, **chosen}

    def halve(self) -> dict[str, list[int]]:
        """Train all settings, as far as each goes; returns the number of each row's best one."""
        waves = self._plan_waves()
        of_teachers = [plan for seed in self.config.tune_seeds for plan in self.inner.teacher_plans(seed)]
        teachers = [replace(plan, tested=False) for plan in of_teachers]
        alive = {name: list(range(len(trials))) for name, trials in self.trials.items()}
        for rung, end in enumerate(self.ends, 1):
            left = {self.trials[row][number].name: self.trials[row][number] for row in alive for number in alive[row]}
            plans = [*teachers] if rung == 1 else []
            for seed in self.config.tune_seeds:
                for wave, names in enumerate(waves, 1):
                    if arms := tuple(left[name] for name in names if name in left):
                        plans.append(self._plan(seed, rung, wave, arms))
            self.inner.launch(plans)
            for plan in plans:
                self.inner.fit(plan)
            scores = self._score(left, rung)
            for team in self.teams:
                trials = alive[team[0]]
                of_team = {trial: mean_of_all([scores[trial_name(name, trial)] for name in team]) for trial in trials}
                count = 1 if end == self.ends[-1] else math.ceil(len(of_team) / 2)
                alive |= dict.fromkeys(team, best_trials(of_team, self.metric, count))
        return alive

    def facts(self) -> Search:
        """Return what results.json has of it, after `search`."""
        records = [self._last_records(seed) for seed in self.config.tune_seeds]
        methods: dict[str, TunedMethod] = {}
        for row, trials in self.trials.items():
            searched = spaces.spaces(self.config, self.arms[row])
            settings = []
            for trial in trials:
                last = [of_seed[trial.name] for of_seed in records]
                options = spaces.options(self.config, trial, searched)
                scores = [last_score(net, self.metric) for net in last]
                settings.append(SettingScores(options, scores, max(len(net.epochs) for net in last)))
            methods[row] = TunedMethod(settings, self.best[row])
        return Search(methods, self._cost(), self.ends)

    def _cost(self) -> SearchCost:
        """Count the epochs of each row's students, and of the seeds' teachers, unless they were loaded.

        Also samples that teachers computed for students, and would have for each setting by itself: outputs that are
        stored once for all its epochs, while the search stores them again at each rung.
        """
        epochs, computed, alone, seconds = dict.fromkeys(self.arms, 0), 0, 0, 0.0
        files = [folder / f"{TEACHER}.json" for folder in self.folders.values() if self.bake_off.teacher_rows]
        teachers = [FitRecord.read(file) for file in files]
        uses_teacher = {name: arm.objective(self.config).uses_teacher for name, arm in self.arms.items()}
        row_of = {trial.name: row for row, trials in self.trials.items() for trial in trials}
        for seed in self.config.tune_seeds:
            done: dict[str, int] = {}
            stored: set[str] = set()  # settings whose teacher's outputs are
            for path in self._list_records(seed):
                record = FitRecord.read(path)
                nets = {name: net for name, net in record.nets.items() if name in row_of}  # an older search had others
                users = {name for name in nets if uses_teacher[row_of[name]]} - stored
                computed += record.teacher_samples or 0
                alone += (record.teacher_samples or 0) * len(users)
                stored |= users if record.teacher_stored else set()
                seconds += record.fit_seconds or 0.0
                done |= {name: len(net.epochs) for name, net in nets.items()}
            for name, count in done.items():
                epochs[row_of[name]] += count
        teacher_epochs = sum(teacher.max_epochs or 0 for teacher in teachers)
        teacher_seconds = sum(teacher.fit_seconds or 0.0 for teacher in teachers)
        return SearchCost(epochs, computed, alone, seconds, teacher_epochs, teacher_seconds)

    def _plan(self, seed: int, rung: int, wave: int, trials: tuple[Arm, ...]) -> FitPlan:
        """Plan the fit of those of a wave that are left until the end of a rung, and let it go on from the last one."""
        plan = FitPlan(
            seed, _fit_name(rung, wave), trials, self.ends[-1], until=self.ends[rung - 1],
            keeps_checkpoint=True, tested=False,
        )  # fmt: skip
        with main_first(f"seed {seed} {plan.name}"):
            if rung > 1 and is_main_process():
                after = plan.checkpoint(self.inner.session.out)
                before = after.with_name(f"{_fit_name(rung - 1, wave)}.ckpt")
                if before.exists() and not (after.exists() or after.with_suffix(".json").exists()):
                    runs = list(FitRecord.read(before.with_suffix(".json")).nets)
                    carry(before, after, runs, [trial.name for trial in trials])
                before.unlink(missing_ok=True)
        return plan

    def _last_records(self, seed: int, rung: int | None = None) -> dict[str, NetRecord]:
        """Return the record of each setting in its last fit, up to a rung."""
        return {name: net for path in self._list_records(seed, rung) for name, net in FitRecord.read(path).nets.items()}

    def _list_records(self, seed: int, rung: int | None = None) -> list[Path]:
        """Return the records of a seed's fits, rung after rung."""
        numbers = range(1, (rung or len(self.ends)) + 1)
        return [path for number in numbers for path in sorted(self.folders[seed].glob(f"rung{number}*.json"))]

    def _score(self, names: Iterable[str], rung: int) -> dict[str, float | None]:
        """Return the mean over the tuning seeds of each setting at this rung; None if it failed with one."""
        records = [self._last_records(seed, rung) for seed in self.config.tune_seeds]
        return {name: mean_of_all([last_score(of_seed[name], self.metric) for of_seed in records]) for name in names}

    def _plan_waves(self) -> list[list[str]]:
        """Plan which settings train side by side, as the folder has it; rows that came later are in further waves."""
        out = self.inner.session.out
        with main_first("plan"):
            plan = load_plan(out, self.config)
            if new := self._list_unplanned(plan["waves"]):
                trials = {trial.name: trial for of_row in self.trials.values() for trial in of_row}
                plan["tune_wave"] = self.config.tune_wave
                plan["waves"] += in_waves(self.inner, [[trials[name] for name in unit] for unit in new])
                if is_main_process():
                    out.mkdir(exist_ok=True)
                    write_json(out / PLAN, plan)
        waves: list[list[str]] = plan["waves"]
        return waves

    def _list_unplanned(self, waves: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the settings that are in none of the waves, those of a team together."""
        planned = {name for wave in waves for name in wave}
        numbers = [(team, trial) for team in self.teams for trial in range(len(self.trials[team[0]]))]
        units = [[trial_name(name, trial) for name in team] for team, trial in numbers]
        return [unit for unit in units if not planned.issuperset(unit)]


def load_plan(folder: Path, config: Namespace) -> dict[str, Any]:
    """Read the plan of a search's folder: `epochs`, `tune_wave`, and `waves` of settings.

    It has no waves yet where there is no plan, or one for another `tune_wave` by which nothing was trained.

    Raises:
        BadInput: it is for another number of epochs.
    """
    path, epochs = folder / PLAN, config.trainer.init_args["max_epochs"]
    plan: dict[str, Any] = {"epochs": epochs, "tune_wave": config.tune_wave, "waves": []}
    if path.exists():
        with reading(path, "out", "the plan of a search"):
            plan |= json.loads(read_text(path))
            plan["waves"] = [list(map(str, wave)) for wave in plan["waves"]]
        if plan["epochs"] != epochs:
            raise BadInput("trainer.max_epochs", epochs, f"{plan['epochs']}, for which settings were searched")
        if plan["tune_wave"] != config.tune_wave and not any(folder.glob("seed*/rung1*")):
            plan["waves"] = []
    return plan


def _fit_name(rung: int, wave: int) -> str:
    return f"rung{rung}" if wave == 1 else f"rung{rung}-{wave}"


def rung_ends(epochs: int) -> list[int]:
    """Return the epochs at which settings are compared: after a third, after two thirds, at the end."""
    return sorted({math.ceil(epochs / 3), math.ceil(2 * epochs / 3), epochs})


def best_trials(scores: Mapping[int, float | None], metric: Metric, count: int) -> list[int]:
    """Return `count` settings with the best scores, in their own order; of equals the first, failed ones last."""

    def rank(trial: int) -> float:
        score = scores[trial]
        return math.inf if score is None else -score if metric.higher_is_better else score

    return sorted(sorted(scores, key=rank)[:count])


def last_score(net: NetRecord, metric: Metric) -> float | None:
    """Return the last score of validation in a student's record; None if it failed, or was not validated."""
    return None if net.failed else metric.last(net.epochs)


def carry(before: Path, after: Path, runs: Sequence[str], kept: Collection[str]) -> None:
    """Write to `after` the checkpoint `before` of a fit of `runs`, in this order, of which the `kept` go on alone."""
    state = safepoints.read(before)
    keep_students(state, runs, kept)
    state["callbacks"]["SafePoints"] |= {"finished": False, "seconds": 0.0}
    state.pop("hyper_parameters", None)
    with atomic(after) as temporary:
        torch.save(state, temporary)
