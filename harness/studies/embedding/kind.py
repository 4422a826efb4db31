"""What embeddings add to a comparison: a teacher that may learn from labels, and what classes the neighbours tell."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules.base import InMemoryData
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.arm_names import choice_at
from harness.runs.nets import load_net
from harness.runs.plans import Arm, FitOutcome, FitPlan
from harness.runs.records import NetRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import TAUGHT_BY, TEACHER, TeacherWeights, format_teachers, is_teacher
from harness.studies import costs
from harness.studies.choices import make_net, net_of_task
from harness.studies.embedding import pictures
from harness.studies.kinds import DataKind, command_line
from harness.studies.next_steps import best_student
from harness.studies.teachers import has_trained_teacher
from lit_modules.embedding.neighbours import probe, shared_neighbours, vote
from lit_modules.embedding.several import SeveralEmbedders, SeveralTeachers
from lit_modules.nets.base import cast_inputs, evaluating
from lit_modules.nets.embedder import Embedder
from lit_modules.nets.stored import TeacherInFile
from lit_modules.objectives.base import Objective

PARTS = "train", "test"
CLASSES = 2  # of data, at least, which neighbours tell
SEEDS = 0, 1  # of two nets, by which one tells whether weights are drawn
SETTINGS: dict[str, Any] = {
    "variants.ce": None, "variants.kd": None, "variants.hint": None, "variants.untrained": "Untrained",
    "variants.cosine": "EmbeddingMatch", "variants.mse": "EmbeddingMatch", "variants.mse.distance": "mse",
    "variants.kl": "SimilarityKL", "variants.queue": "SimilarityKL", "variants.queue.queue": "auto",
    "variants.rkd": "RKD", "variants.tokens": "TokenSimilarity",
}  # fmt: skip


class EmbeddingKind(DataKind):
    """What samples whose labels no student sees add to a comparison.

    A teacher that is not loaded learns from labels, as a classifier, and embeds by what its classifier reads.
    """

    settings = SETTINGS

    def __init__(self, session: Session, arms: Iterable[Arm]) -> None:
        super().__init__(session, arms)
        self.arms = list(arms)
        self._brings_weights = dict[str, bool]()  # by the teacher's key

    def check(self) -> None:
        check_sizes(self.session.data, "images, which can be neighbours")
        for arm in self.arms:
            if TEACHER not in arm.teachers:
                expected = f"{TEACHER} among its teachers, whose neighbours judge all students"
                raise BadInput(f"{TAUGHT_BY}.{arm.name}", format_teachers(arm.teachers), expected)
            if len(arm.teachers) > 1 and self.config.embed == "teacher":
                expected = f"own beside {format_teachers(arm.teachers)}, which teach {arm.name}"
                raise BadInput("embed", "teacher", expected)

    def has_trained_teacher(self, session: Session, key: str = TEACHER) -> bool:
        """Also of a net whose weights depend on no seed: it brings them, as those of other libraries do."""
        if has_trained_teacher(session, key):
            return True
        if session.config.teacher_epochs:
            return False
        if key not in self._brings_weights:
            arguments = session.data.net_arguments
            first, second = (
                net_of_task(session, make_net(session.config, key, seed, arguments), key) for seed in SEEDS
            )
            states = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
            self._brings_weights[key] = all(torch.equal(one, other) for one, other in states)
            if self._brings_weights[key]:
                name = choice_at(session.config, key).name
                session.tell(f"{key} {name}: its weights depend on no seed, so they are taken as trained")
        return self._brings_weights[key]

    @contextmanager
    def data_of_teacher(self, session: Session, key: str = TEACHER) -> Iterator[None]:
        data: Any = session.data
        if self.has_trained_teacher(session, key):
            yield
            return
        if data.num_classes < CLASSES:
            expected = f"a teacher that is loaded: {data.name} has no classes from which one could learn"
            raise BadInput(key, choice_at(session.config, key).name, expected)
        task, data.task = data.task, "classification"
        try:
            yield
        finally:
            data.task = task

    def merge_teachers(self, session: Session, nets: Mapping[str, nn.Module], shares: TeacherWeights) -> nn.Module:
        if len(nets) == 1:
            return nets[TEACHER]
        order = sorted(nets, key=lambda key: key != TEACHER)  # which judges
        embedders = [self.prepare_teacher(session, nets[key], []) for key in order]
        total = math.fsum(shares.values())
        return SeveralEmbedders(embedders, [shares[key] / total for key in order])

    def prepare_objective(self, objective: Objective, teacher: nn.Module) -> Objective:
        if not isinstance(teacher, SeveralEmbedders) or not objective.uses_teacher:
            return objective
        return SeveralTeachers.of(objective, teacher.weights)

    def prepare_teacher(self, session: Session, teacher: nn.Module, arms: Iterable[Arm]) -> nn.Module:
        is_prepared = isinstance(teacher, Embedder | SeveralEmbedders | TeacherInFile)
        return teacher if is_prepared else Embedder(teacher, session.data.input_shape)

    def prepare_student(self, session: Session, net: nn.Module, teacher: nn.Module, seed: int) -> nn.Module:
        if (
            session.config.embed == "own"
            or not isinstance(net, Embedder)
            or not isinstance(teacher, Embedder | TeacherInFile)
        ):
            return net
        return with_seed(seed, lambda: net.with_width(teacher.width))

    def add_figures(
        self, session: Session, plan: FitPlan, arm: Arm, net: nn.Module, outcome: FitOutcome, record: NetRecord
    ) -> NetRecord:
        if not plan.tested or record.failed is not None:
            return record
        figures: dict[str, float | None] = {}
        if is_teacher(arm.net):  # as a classifier it may have other values of single samples
            net, record = self.prepare_teacher(session, net, []), replace(record, samples={})
        with outcome.autocast(), costs.alone(outcome.device):
            (bank, known), (queries, labels) = (embed(session.data, net, part, outcome.device) for part in PARTS)
            if is_teacher(arm.net):
                figures["test_neighbours"] = self._shared_with_teacher(session, plan, arm, queries, outcome.device)
        if plan.seed == session.config.seeds[0] and plan.until is None:
            pictures.write_neighbours(plan.folder(session.out) / arm.name, queries)
        if session.data.num_classes >= CLASSES:
            for name, classify in (("test_knn", vote), ("test_probe", probe)):
                predicted = classify(queries, bank, known, session.data.num_classes)
                figures[name] = float((predicted == labels).double().mean())
        return replace(record, figures={**record.figures, **figures})

    def _shared_with_teacher(
        self, session: Session, plan: FitPlan, arm: Arm, embeddings: Tensor, device: torch.device
    ) -> float:
        """Return the share of neighbours of test images that a teacher's embeddings (n, D) share with the first's."""
        if arm.net == TEACHER:
            return 1.0
        first = load_net(plan.folder(session.out) / TEACHER, "out").to(device)
        theirs, _ = embed(session.data, self.prepare_teacher(session, first, []), PARTS[-1], device)
        return float(shared_neighbours(embeddings, theirs).mean())

    def next_steps(self, session: Session, folder: str) -> dict[str, str]:
        return {"predict": command_line("predict.py", run=folder, inputs="FOLDER", out="embeddings.npz")}

    def sections(self, session: Session, results: Results) -> list[Section]:
        best = best_student(results)
        if best is None:
            return []
        return pictures.section(results, session.out / f"seed{results.seeds[0]}", best, session.data.test_images)


def check_sizes(data: InMemoryData, what: str) -> None:
    """Raise BadInput for a part of one sample, among which there is nothing to find."""
    for part in ("validation", "test"):
        if data.sizes[part] == 1:
            expected = f"at least 2 {what}" + ", or 0" * (part == "validation")
            raise BadInput(f"data.{part}_size", 1, expected)


def embed(data: InMemoryData, net: nn.Module, part: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the embeddings (n, D) float64 of all samples of a part, as they are without augmentation, and labels."""
    embeddings, labels = list[Tensor](), list[Tensor]()
    with evaluating(net):
        for places in torch.arange(data.sizes[part]).split(data.evaluation_batch_size):
            inputs, known = data.samples(part, places)
            of_net = (
                net.rows(part, places).logits
                if isinstance(net, TeacherInFile)
                else net(cast_inputs(net, inputs.to(device)))
            )
            embeddings.append(of_net.double().cpu())
            labels.append(known)
    return torch.cat(embeddings), torch.cat(labels)
