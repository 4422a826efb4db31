"""Students of several teachers that embed: the weighted sum of one method beside each, on any number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.keyed import with_seed
from lit_modules.distillation import Distillation
from lit_modules.embedding.several import SeveralEmbedders, SeveralTeachers
from lit_modules.embedding.task import Embedding
from lit_modules.nets import DeepNN, LightNN, ResNet
from lit_modules.nets.layers import run
from lit_modules.objectives import RKD, EmbeddingMatch, Objective, SimilarityKL, TokenSimilarity
from tests.lit_modules.embedding.test_training import data, embedder
from tests.training import SHAPE, assert_agree, fit, outcome, weights

WEIGHTS = [0.75, 0.25]
METHODS: dict[str, Any] = {
    "match": EmbeddingMatch, "mse": lambda: EmbeddingMatch("mse"), "queue": lambda: SimilarityKL(queue=50),
    "rkd": RKD, "tokens": TokenSimilarity,
}  # fmt: skip


def teachers() -> SeveralEmbedders:
    return SeveralEmbedders([embedder(DeepNN, 1), embedder(ResNet, 2, width=24)], WEIGHTS)


def module(methods: dict[str, Any], teacher: SeveralEmbedders | None = None) -> Distillation:
    objectives: dict[str, Objective] = {name: SeveralTeachers.of(make(), WEIGHTS) for name, make in methods.items()}
    students = {name: (embedder(LightNN), objective) for name, objective in objectives.items()}
    return Distillation(
        teacher or teachers(), students, SHAPE, task=Embedding(), samples=data().sizes["train"], labelled=False
    )


def test_the_loss_is_the_weighted_sum_beside_each_teacher() -> None:
    made = module({"match": lambda: EmbeddingMatch(project=True)}).double()
    student: Any = made.students["match"]
    teacher: Any = made.teacher.eval()
    labels = torch.zeros(5, dtype=torch.int64)
    inputs = with_seed(1, lambda: torch.randn(5, *SHAPE, dtype=torch.float64))
    outputs = run(teacher, inputs, student.objective.teacher_layers.values())
    ours = student.objective.terms(student.eval()(inputs), outputs, labels)
    assert list(ours) == ["0.cosine", "1.cosine"]
    s, total = student.net(inputs), torch.zeros((), dtype=torch.float64)
    widths = set()
    for part, net, share in zip(student.objective.objectives, teacher.nets, WEIGHTS, strict=True):
        t: Tensor = net(inputs)
        p = s @ part.projection.weight.T + part.projection.bias
        total = total + share * (1 - (p * t).sum(1) / p.norm(dim=1) / t.norm(dim=1)).mean()
        widths.add(t.shape[1])
    assert len(widths) == 2
    loss = sum(term.weight * term.values.mean() for term in ours.values())
    torch.testing.assert_close(loss, total, rtol=1e-9, atol=1e-9)
    assert torch.equal(outputs.logits, teacher.nets[0](inputs))  # which judges


@pytest.mark.parametrize("name", ["mse", "queue", "rkd", "tokens"])
def test_a_teacher_of_no_weight_changes_nothing(name: str) -> None:
    """Beside a second one without weight a student learns as from the first alone."""
    alone: Objective = METHODS[name]()
    shapes: dict[str, Any] = {"task": Embedding(), "samples": data().sizes["train"], "labelled": False}
    one = Distillation(embedder(DeepNN, 1), {name: (embedder(LightNN), alone)}, SHAPE, **shapes)
    both = SeveralTeachers.of(METHODS[name](), [1.0, 0.0])
    two = Distillation(teachers(), {name: (embedder(LightNN), both)}, SHAPE, **shapes)
    first: Any = both.objectives[0]
    first.load_state_dict(alone.state_dict())  # of projections, which begin with noise
    ended = [weights(fit(made.double(), data(), max_epochs=1, precision="64-true")) for made in (one, two)]
    nets = [{k: x for k, x in state.items() if k.startswith(f"students.{name}.net.")} for state in ended]
    for key, value in nets[0].items():
        torch.testing.assert_close(nets[1][key], value, rtol=0, atol=1e-12)


def test_any_number_of_processes_gives_the_same(tmp_path: Path) -> None:
    tags = [f"{name}/train/loss" for name in METHODS]
    one, two = (outcome(module(METHODS), data(), tmp_path, tags, n, precision="64-true") for n in (1, 2))
    assert_agree(one, two)
