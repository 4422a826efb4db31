"""What texts add to a comparison: a teacher with other tokens or stored outputs, and what nets write."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from apprentice.batch import Batch
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.plans import Arm, FitOutcome, FitPlan
from harness.runs.records import NetRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import TEACHER
from harness.studies.kinds import DataKind, command_line
from harness.studies.text import answers, answers_section
from harness.studies.text.mixer_parts import add_parts
from harness.studies.text.stored_outputs import StoredOutputs, is_stand_in
from harness.studies.text.teacher_tokens import TeacherTokens
from harness.studies.text.training_flops import count_training
from harness.studies.text.vocabularies import write_vocabularies
from harness.studies.training_flops import LearnedBatches
from lit_modules.nets.identity import Origin
from lit_modules.training.loop import Loop


class TextKind(DataKind):
    """What texts, with a label for each token, add to a comparison."""

    exports_students = True

    def __init__(self, session: Session, arms: Iterable[Arm]) -> None:
        super().__init__(session, arms)
        self.tokens = TeacherTokens(session.config)
        self.stored = StoredOutputs(session, arms, self.tokens.near and self.tokens.near.shared)

    def check(self) -> None:
        answers.check_answers(self.session)
        self.stored.check()

    @contextmanager
    def data_of_teacher(self, session: Session, key: str = TEACHER) -> Iterator[None]:
        with self.tokens.data(session):
            yield

    def stand_in(self, seed: int) -> nn.Module | None:
        return self.stored.net(seed)

    def is_stand_in(self, folder: Path) -> bool:
        return is_stand_in(folder)

    def teacher_source(self, seed: int) -> str | None:
        return self.stored.source(seed)

    def origins(self, session: Session) -> dict[str, Origin]:
        return self.tokens.origins(session)

    def prepare_teacher(self, session: Session, teacher: nn.Module, arms: Iterable[Arm]) -> nn.Module:
        return self.tokens.prepare(session, teacher, arms)

    def module_arguments(self, seed: int) -> dict[str, Any]:
        return {"loss_chunk": self.config.loss_chunk, "stored": self.stored.options(seed)}

    def before_seed(self, seed: int) -> None:
        self.stored.take_record(seed)

    def after_seed(self, seed: int) -> None:
        self.stored.keep_record(seed)

    def count_training(self, module: Loop, run: str, batch: Batch, trained: LearnedBatches) -> int | None:
        trainer = self.session.data.trainer
        return count_training(module, run, trainer.accumulate_grad_batches if trainer else 1, batch, trained)

    def add_figures(
        self, session: Session, plan: FitPlan, arm: Arm, net: nn.Module, outcome: FitOutcome, record: NetRecord
    ) -> NetRecord:
        record = add_parts(session, plan, net, outcome, record)
        return answers.add_answers(session, plan, arm.name, net, outcome, record)

    def sections(self, session: Session, results: Results) -> list[Section]:
        by_net = answers.read_answers(session.out / f"seed{results.seeds[0]}", results.nets)
        return answers_section.section(results, by_net)

    def next_steps(self, session: Session, folder: str) -> dict[str, str]:
        has_chats = getattr(session.data, "chat_template", None) is not None
        chat = {"chat": command_line("chat.py", run=folder)} if has_chats else {}
        return {**chat, "continue": command_line("gpt.py", run=folder, sample="PROMPT")}

    def finish(self, session: Session, teachers: Iterable[str], students: Iterable[str]) -> None:
        with self.data_of_teacher(session):
            write_vocabularies(session, teachers)
        write_vocabularies(session, students)
