"""What rows of texts add to a comparison: a teacher that may learn from answers, and what queries find."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from apprentice.errors import BadInput
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.arm_names import choice_at
from harness.runs.plans import Arm, FitOutcome, FitPlan
from harness.runs.records import NetRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import TEACHER, is_teacher
from harness.studies import costs
from harness.studies.embedding import retrieved_texts
from harness.studies.embedding.kind import EmbeddingKind, check_sizes, embed
from harness.studies.kinds import command_line
from harness.studies.next_steps import best_student
from lit_modules.embedding.parts import ranks_pairs
from lit_modules.embedding.retrieval import QUERIES

FEWEST_TO_RANK = 3  # texts of a row: a query, and two to choose from


class RetrievalKind(EmbeddingKind):
    """What rows of texts add to a comparison.

    A teacher that is not loaded learns to find the answers of queries, which the students do not see.
    """

    settings: ClassVar[dict[str, Any]] = {}  # see `text_settings`
    exports_students = True

    def check(self) -> None:
        check_sizes(self.session.data, "rows of texts, among which queries look")
        if self.config.zoo:
            raise BadInput("zoo", "true", "not allowed with `data Pairs`, which trains all its methods")
        if others := self.config.teachers:
            name, choice = next(iter(others.items()))
            raise BadInput(f"teachers.{name}", choice.name, "not allowed with `data Pairs`: one teacher")

    @contextmanager
    def data_of_teacher(self, session: Session, key: str = TEACHER) -> Iterator[None]:
        data: Any = session.data
        if not self.has_trained_teacher(session, key) and (data.label_shape[0] == 1 or data.scores("test") is not None):
            expected = f"a teacher that is loaded: {data.name} has no answers to queries from which one could learn"
            raise BadInput(key, choice_at(session.config, key).name, expected)
        yield

    def prepare_student(self, session: Session, net: nn.Module, teacher: nn.Module, seed: int) -> nn.Module:
        if session.config.embed == "teacher" and (ranks_pairs(net) or ranks_pairs(teacher)):
            raise BadInput("embed", "teacher", "own: a net that scores pairs has no embeddings")
        data: Any = session.data
        if ranks_pairs(net) and data.label_shape[0] < FEWEST_TO_RANK and data.scores("test") is None:
            expected = "a net that embeds: of rows without negatives there is one text to score, always the first"
            raise BadInput("student", session.config.student.name, expected)
        return super().prepare_student(session, net, teacher, seed)

    def add_figures(
        self, session: Session, plan: FitPlan, arm: Arm, net: nn.Module, outcome: FitOutcome, record: NetRecord
    ) -> NetRecord:
        if not plan.tested or record.failed is not None:
            return record
        if plan.seed == session.config.seeds[0] and plan.until is None and not ranks_pairs(net):
            with outcome.autocast(), costs.alone(outcome.device):
                texts, numbers = embed(session.data, net, "test", outcome.device)
            folder = plan.folder(session.out) / arm.name
            retrieved = retrieved_texts.retrieve(session.data, texts, numbers)
            retrieved_texts.write_results(folder, retrieved)
        if not is_teacher(arm.net):
            return record
        # Of itself, and of others than a row's candidates.
        unknown = ["ndcg_teacher", *(QUERIES if ranks_pairs(net) else ())]
        missing = {name: None for name in record.figures if name.removeprefix("test_") in unknown}
        return replace(record, figures={**record.figures, **missing})

    def next_steps(self, session: Session, folder: str) -> dict[str, str]:
        return {"predict": command_line("predict.py", run=folder, inputs="TEXTS.txt", out="embeddings.npz")}

    def sections(self, session: Session, results: Results) -> list[Section]:
        best = best_student(results)
        return [] if best is None else retrieved_texts.section(results, session.out / f"seed{results.seeds[0]}", best)
