"""What experiments train: arms, each a net and how it learns, as `only` picks them, and plans of their fits."""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apprentice.errors import BadInput
from harness import cli
from harness.runs.arm_names import VARIANTS, ArmName, arm_names
from harness.runs.teacher_weights import BY_TEACHER, TEACHER, TeacherWeights, is_teacher, teachers_of
from lit_modules.objectives.base import Objective

SUPERVISED = cli.Choice("lit_modules.objectives.CrossEntropy")  # the method of nets that learn from labels alone


@dataclass(frozen=True)
class Arm:
    """A student of a comparison, its teacher, or the net of another experiment."""

    row: str  # its name in the table, in results.json and of its folder
    net: str  # the flag that chooses its net: `student`, `students.small`, `teacher`
    method: cli.Choice = SUPERVISED  # class and options of its objective
    variant: str = ""  # the name of the method in `variants`
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # options of the optimizer that replace the run's
    trial: int | None = None  # the number of its setting, where a search tries several of a row
    teachers: TeacherWeights = field(default_factory=lambda: {**BY_TEACHER})  # that it learns from

    @property
    def name(self) -> str:
        return self.row if self.trial is None else trial_name(self.row, self.trial)

    @property
    def student(self) -> str | None:
        """The name of its net in `students`."""
        return self.net.partition(".")[2] or None

    def objective(self, config: Namespace) -> Objective:
        """Build its objective; peers that are named by their variants are those of its net, others are rows."""
        objective: Objective = cli.build(self.method, f"{VARIANTS}.{self.variant}")
        for part in (part for part in objective.modules() if isinstance(part, Objective)):
            part.peers = [self._peer(peer, config) for peer in part.peers]
        return objective

    def _peer(self, peer: str, config: Namespace) -> str:
        row = ArmName(peer, self.student).name if peer in config.variants else peer
        return row if self.trial is None else trial_name(row, self.trial)

    def settings(self, config: Namespace) -> Namespace:
        """Return the run's settings with its own options of the optimizer; a teacher's with all that are its own."""
        if is_teacher(self.net):
            return of_teacher(config)
        if not self.optimizer:
            return config
        key = "optimizer" if "optimizer" in vars(config) else "model"  # a module that makes its own
        chosen = vars(config)[key]
        return Namespace(**{**vars(config), key: cli.Choice(chosen.class_path, {**chosen.init_args, **self.optimizer})})


def teams(arms: Iterable[Arm], config: Namespace) -> list[tuple[Arm, ...]]:
    """Group arms: those that learn from one another are a team, in the order of the arms."""
    names = {arm.name: arm for arm in arms}
    linked_sets: list[set[str]] = []
    for arm in names.values():
        linked = {arm.name, *(peer for peer in arm.objective(config).peers if peer in names)}
        joined = [team for team in linked_sets if team & linked]
        linked_sets = [team for team in linked_sets if not team & linked] + [set.union(linked, *joined)]
    return [tuple(arm for arm in names.values() if arm.name in team) for team in linked_sets]


def of_teacher(config: Namespace) -> Namespace:
    """Return the run's settings with the optimizer, scheduler and batch size of a teacher that has its own."""
    settings = vars(config)
    own = {key: settings[f"{TEACHER}_{key}"] for key in ("optimizer", "scheduler") if settings.get(f"{TEACHER}_{key}")}
    if (rows := settings.get(f"{TEACHER}_batch_size")) is not None:
        own["data"] = cli.Choice(config.data.class_path, {**config.data.init_args, "batch_size": rows})
    return Namespace(**{**settings, **own})


@contextmanager
def flags_of_teacher(config: Namespace) -> Iterator[None]:
    """Rename `optimizer` and `scheduler` in the argument of a BadInput to the teacher's, where it has its own."""
    try:
        yield
    except BadInput as fault:
        flag = f"{TEACHER}_{fault.argument.partition('.')[0]}"
        if fault.argument.startswith(("optimizer", "scheduler")) and vars(config).get(flag):
            raise BadInput(f"{TEACHER}_{fault.argument}", fault.value, fault.expected) from None
        raise


def trial_name(row: str, trial: int) -> str:
    """Return the name of one of several settings of a row; no row has such a name."""
    return f"{row}@{trial}"


@dataclass(frozen=True)
class FitPlan:
    """One fit: what it trains, how far, and what is kept and tested."""

    seed: int  # it belongs to the run's folder `seed<k>`
    name: str  # of its record and its checkpoint there
    arms: tuple[Arm, ...]  # the nets that it trains in one pass over the data
    epochs: int | None = None  # of its Trainer, as `trainer.max_epochs` has them; None without training
    is_trained: bool = False  # whether the nets have their weights already and are only tested
    # The epoch after which it ends, under the schedule of all epochs; only its checkpoint has the nets.
    until: int | None = None
    # Whether the fit goes on from its checkpoint, once it is finished, if it gets more epochs.
    keeps_checkpoint: bool = False
    tested: bool = True  # whether nets are tested, and their costs measured
    batch_size: int | None = None  # in place of `data.batch_size`
    all_labels: bool = False  # whether it learns from labels that `data.labelled` hides, too
    trainer: Mapping[str, Any] = field(default_factory=dict)  # options of the Trainer that replace the user's
    title: str = ""  # how lines about it begin; by default by its seed and name

    @property
    def label(self) -> str:
        """How lines about it begin."""
        return self.title or f"seed {self.seed} {self.name}"

    def folder(self, out: Path) -> Path:
        return out / f"seed{self.seed}"

    def record(self, out: Path) -> Path:
        """Return the file of its results; the fit is finished when it is there."""
        return self.folder(out) / f"{self.name}.json"

    def checkpoint(self, out: Path) -> Path:
        """Return the file from which it resumes."""
        return self.folder(out) / f"{self.name}.ckpt"


def arms(config: Namespace) -> dict[str, Arm]:
    """Return the arms of `only`, and those that they learn from, by name, with the user's settings."""
    rows = arm_names(Namespace(**{**vars(config), "only": None}))
    taught, methods = teachers_of(config, rows), config.variants
    all_arms = {
        name: Arm(name, row.net, methods[row.variant], row.variant, teachers=taught[name]) for name, row in rows.items()
    }
    names, queue = set[str](), deque(arm_names(config))
    while queue:
        name = queue.popleft()
        if name in all_arms and name not in names:
            names.add(name)
            queue.extend(all_arms[name].objective(config).peers)
    return {name: arm for name, arm in all_arms.items() if name in names}


@contextmanager
def flags_of(arms: Iterable[Arm]) -> Iterator[None]:
    """Rename the arm in the argument of a BadInput to its method, and name its net in the text."""
    try:
        yield
    except BadInput as fault:
        for arm in arms:
            flag = f"{VARIANTS}.{arm.name}"
            if arm.student and (fault.argument == flag or fault.argument.startswith(f"{flag}.")):
                whole = f"{VARIANTS}.{arm.variant}{fault.argument.removeprefix(flag)}"
                raise BadInput(whole, fault.value, f"{fault.expected} (for `{arm.net}`)") from None
        raise


@dataclass(frozen=True)
class FitOutcome:
    """What a fit leaves in this process."""

    seconds: float | None  # of training over all sessions; None if the module was only tested
    epochs: float | None  # after which training ended; None if the module was only tested
    scores: dict[str, float]  # what the test logged; nothing without one
    device: torch.device  # where this process has the module
    autocast: Callable[[], Any]  # makes the context of the Trainer's precision
    samples: dict[str, dict[str, Tensor]]  # of a test, by run and by name, in the main process: `RunScores.of_samples`
    best_epochs: Mapping[str, float] = field(default_factory=dict)  # by run, where its best weights are taken
