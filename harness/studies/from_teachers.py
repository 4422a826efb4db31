"""Students that are made of their teacher's weights: what is measured for that once a seed, written down and said."""

import time
from collections.abc import Callable
from typing import Any

import yaml
from torch import Tensor, nn

from apprentice import keyed
from apprentice.batch import IGNORED
from datamodules.base import InMemoryData
from harness import cli
from harness.runs.arm_names import choice_at
from harness.runs.files import read_text, write_text
from harness.runs.launch import is_main_process, main_first
from harness.runs.quiet import notice
from harness.runs.session import Session
from lit_modules.nets.from_teacher import FromTeacher

MEASURED = 256  # labels, at least, of whole samples
SECONDS = 15.0  # between two lines of progress


class FromTeachers:
    """How students are made of their teachers, by the seed and the flag that chose the student.

    Until `choose` was called for one, it is made without measuring: enough to check the options.
    """

    def __init__(self, session: Session) -> None:
        self.run = session
        self.plans: dict[tuple[int, str], Any] = {}

    def student(self, key: str, seed: int, teacher: nn.Module) -> nn.Module:
        """Build the student chosen under a key; BadInput if its options don't fit the teacher."""
        choice = choice_at(self.run.config, key)
        with cli.refusals(choice, key):
            chosen: FromTeacher = cli.build(choice, key)
            plan = self.plans.get((seed, key)) or chosen.first(teacher)
            return keyed.with_seed(seed, lambda: chosen.make(teacher, plan))  # new layers begin with noise

    def choose(self, key: str, seed: int, teacher: nn.Module) -> None:
        """Measure what a student is made of, or read what was measured before: on rank zero, for all ranks."""
        if (seed, key) in self.plans:
            return
        run, choice = self.run, choice_at(self.run.config, key)
        with cli.refusals(choice, key):
            chosen: FromTeacher = cli.build(choice, key)
        path = run.out / f"seed{seed}" / f"{key.replace('.', '-')}.{chosen.kind}.yaml"
        with main_first(f"{chosen.kind} {key} {seed}"):
            if not path.exists() and is_main_process():
                with cli.refusals(choice, key):
                    say = _say_at_times(f"seed {seed} {key}: ")
                    texts = draw_texts(run.data, seed)
                    plan = keyed.with_seed(seed, lambda: chosen.choose(teacher, *texts, say))
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, yaml.safe_dump(plan._asdict(), default_flow_style=None))
            self.plans[seed, key] = chosen.plan_class(**yaml.safe_load(read_text(path)))
        if is_main_process():
            notice(f"seed {seed} {key}: {choice.name} {self.plans[seed, key]}; {path.relative_to(run.out)}")


def draw_texts(data: InMemoryData, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens (b, T) and labels (b, T) of samples that a run trains on, drawn by the seed."""
    order, count = keyed.permutation(len(data.split("train").labels), seed, *b"pruning"), 1
    while True:
        batch = data.samples("train", order[:count])
        if count >= len(order) or int((batch.labels != IGNORED).sum()) >= MEASURED:
            return batch.inputs, batch.labels
        count += 1


def _say_at_times(start: str) -> Callable[[str], None]:
    """Return what says lines that begin so, if SECONDS have passed since the last one or since now."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS:
            last = time.monotonic()
            notice(start + line)

    return say
