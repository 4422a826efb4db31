"""Methods that learn from a teacher's embeddings equal their formulas in float64, values and gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets import Outputs
from lit_modules.nets.outputs import KINDS
from lit_modules.objectives import (
    CC,
    CRD,
    PKT,
    RKD,
    SP,
    EmbeddingMatch,
    Hinton,
    Objective,
    SimilarityKL,
    Sum,
    TokenMatch,
    TokenSimilarity,
    Untrained,
)
from lit_modules.objectives.context import StepContext
from lit_modules.objectives.embedding_match import ProjectedObjective
from lit_modules.objectives.token_match import TokenObjective
from tests.formulas import assert_equal, total

B, LABELS = 6, torch.full((6,), -1)


def embed(seed: int, width: int, rows: int = B) -> Outputs:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Outputs(x.requires_grad_(), {})


def losses(objective: ProjectedObjective, student: Outputs, teacher: Outputs) -> Tensor:
    return total(objective(objective.adapt(student), teacher, LABELS[: len(student.logits)]))


def built(objective: ProjectedObjective, student: Outputs, teacher: Outputs) -> ProjectedObjective:
    objective.build(student, teacher, *([StepContext()] if isinstance(objective, SimilarityKL) else []))
    return objective.double()


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda s, t: 1 - s @ t / (s.norm() * t.norm()),
    "l2": lambda s, t: (s - t).norm(),
    "mse": lambda s, t: (s - t) @ (s - t),
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("width", [5, 7])
def test_matches_are_means_of_distances(distance: str, width: int) -> None:
    student, teacher = embed(0, width), embed(1, 5)
    objective = built(EmbeddingMatch(distance, match_weight=3.0), student, teacher)
    projected = student.logits
    if width != 5:  # a linear layer with bias leads to the teacher's space
        linear = objective.projection
        projected = projected @ linear.weight.T + linear.bias
    expected = torch.stack([DISTANCES[distance](s, t) for s, t in zip(projected, teacher.logits, strict=True)])
    assert_equal(losses(objective, student, teacher), 3 * expected.mean(), [student.logits, *objective.parameters()])


def test_an_embedding_that_is_the_teachers_has_a_gradient_of_zero() -> None:
    for distance in DISTANCES:
        student = embed(0, 5)
        objective = built(EmbeddingMatch(distance), student, student)
        teacher = Outputs(student.logits.detach().clone(), {})
        (gradient,) = torch.autograd.grad(losses(objective, student, teacher), student.logits)
        assert gradient.abs().max() < 1e-12


cosine = DISTANCES["cosine"]


def kl_of(s: Tensor, t: Tensor, others: list[list[int]], bank: Tensor, of_s: float, of_t: float) -> Tensor:
    """The mean divergence of similarities to places in a bank, row by row."""

    def shares(x: Tensor, places: list[int], temperature: float) -> Tensor:
        cosines = torch.stack([x @ bank[j] / (x.norm() * bank[j].norm()) for j in places])
        powers = (cosines / temperature).exp()
        return powers / powers.sum()

    rows = []
    for i, places in enumerate(others):
        p, q = shares(t[i], places, of_t), shares(s[i], places, of_s)
        rows.append((p * (p / q).log()).sum())
    return torch.stack(rows).mean()


def test_similarities_are_those_to_the_rest_of_the_batch() -> None:
    student, teacher = embed(0, 5), embed(1, 5)
    objective = built(SimilarityKL(temperature=0.3, teacher_temperature=0.2), student, teacher)
    others = [[j for j in range(B) if j != i] for i in range(B)]
    expected = kl_of(student.logits, teacher.logits.detach(), others, teacher.logits.detach(), 0.3, 0.2)
    fixed = Outputs(teacher.logits.detach(), {})
    assert_equal(losses(objective, student, fixed), expected, student.logits)


@pytest.mark.parametrize("queue", [4, 10])
def test_a_queue_holds_the_latest_embeddings_this_batch_among_them(queue: int) -> None:
    objective, seen = SimilarityKL(queue=queue, temperature=0.3), torch.zeros(0, 5, dtype=torch.float64)
    for number in range(3):
        student, teacher = embed(2 * number, 5), Outputs(embed(2 * number + 1, 5).logits.detach(), {})
        if not number:
            built(objective, student, teacher)
        first = teacher.logits[:queue]  # of a batch longer than the queue
        seen = torch.cat([seen, first])[-queue:]
        expected = kl_of(student.logits, teacher.logits, [[*range(len(seen))]] * B, seen, 0.3, 0.3)
        assert_equal(losses(objective, student, teacher), expected, student.logits)
        objective.after_batch(objective.adapt(student), teacher, LABELS)


def maps(seed: int, channels: int, height: int, width: int) -> Outputs:
    x = torch.randn(B, channels, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Outputs(embed(seed, 5).logits, {"default": x.requires_grad_()})


def places(objective: TokenObjective, student: Outputs, teacher: Outputs) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each image the student's and the teacher's vectors at each place of the teacher's grid."""
    f_s, f_t = student.features["default"], teacher.features["default"].detach()
    linear = objective.projection
    projected = torch.einsum("oc,bchw->bohw", linear.weight[:, :, 0, 0], f_s) + linear.bias[:, None, None]
    size = f_t.shape[2:]
    if projected.shape[2:] != size:
        projected = torch.nn.functional.interpolate(projected, size, mode="bilinear", align_corners=False)
    cells = [(i, j) for i in range(size[0]) for j in range(size[1])]
    return [
        ([s[:, i, j] for i, j in cells], [t[:, i, j] for i, j in cells]) for s, t in zip(projected, f_t, strict=True)
    ]


@pytest.mark.parametrize("size", [(2, 3), (4, 5)])
@pytest.mark.parametrize("method", ["mse", "cosine", "similarity"])
def test_tokens_are_compared_on_the_teachers_grid(method: str, size: tuple[int, int]) -> None:
    student, teacher = maps(0, 4, *size), maps(1, 3, 2, 3)
    objective = TokenSimilarity(0.3, 2.0) if method == "similarity" else TokenMatch(method, 2.0)  # type: ignore[arg-type]
    objective.build(student, teacher)
    objective.double()
    rows = []
    for s, t in places(objective, student, teacher):
        if method == "similarity":
            cosines = ([torch.stack([1 - cosine(a, b) for b in x]) for a in x] for x in (t, s))
            p, q = (torch.stack([(row / 0.3).softmax(0) for row in of_net]) for of_net in cosines)
            rows.append((p * (p / q).log()).sum(1).mean())
        else:
            rows.append(torch.stack([DISTANCES[method](a, b) for a, b in zip(s, t, strict=True)]).mean())
    fixed = Outputs(teacher.logits, {"default": teacher.features["default"].detach()})
    found = total(objective(objective.adapt(student), fixed, LABELS))
    assert_equal(found, 2 * torch.stack(rows).mean(), [student.features["default"], *objective.parameters()])


def test_labels_have_no_part_in_what_relates_embeddings() -> None:
    """Without labels a method's cross-entropy is left out, and nothing else changes."""
    for make in (RKD, SP, PKT, CC):
        objective, student, teacher = make(), embed(0, 5), embed(1, 7)
        for outputs in (student, teacher):
            outputs.features.update(pooled=outputs.logits, default=outputs.logits)
        terms = objective.terms(student, teacher, LABELS.clamp(min=0), StepContext())
        without = objective.terms(student, teacher, LABELS.clamp(min=0), StepContext(has_labels=False))
        assert terms.keys() - without.keys() == {"ce"}
        for name, term in without.items():
            assert torch.equal(term.values, terms[name].values)


def test_methods_say_what_they_compare() -> None:
    assert all(make().compares == {*KINDS} for make in (RKD, SP, PKT, CC))
    assert Hinton().compares == CRD().compares == Sum([Hinton(), RKD()]).compares == {"classes"}
    assert Sum([EmbeddingMatch(), RKD()]).compares == {"embeddings", "scores"}


def test_an_untrained_student_has_no_gradient() -> None:
    student = embed(0, 5)
    (gradient,) = torch.autograd.grad(total(Untrained()(student, None, LABELS)), student.logits)
    assert gradient.abs().max() == 0


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: EmbeddingMatch("dot"), "distance dot: expected cosine, l2 or mse"),  # type: ignore[arg-type]
        (lambda: EmbeddingMatch(match_weight=-1), "match_weight -1: expected a number of 0 or more"),
        (lambda: SimilarityKL(queue=-1), "queue -1: expected a number of samples, 0 or more, or auto"),
        (lambda: SimilarityKL(temperature=0), "temperature 0: expected a number above 0"),
        (
            lambda: built(EmbeddingMatch(project=False), embed(0, 5), embed(1, 7)),
            "project False: expected true: the student embeds in 5 values, the teacher in 7",
        ),
    ],
)
def test_options_that_can_not_be_used_are_refused(make: Callable[[], Objective], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        make()


@pytest.mark.parametrize(("samples", "length"), [(3, 1), (36, 8), (1293, 256), (2048, 512), (10**6, 8192)])
def test_an_automatic_queue_holds_up_to_a_quarter_of_the_set(samples: int, length: int) -> None:
    objective = SimilarityKL(queue="auto")
    objective.build(embed(0, 5), embed(1, 5), StepContext(samples=samples))
    assert objective.length == len(objective.embeddings) == length
    with pytest.raises(BadInput, match="queue auto: expected a number of samples"):
        SimilarityKL(queue="auto").build(embed(0, 5), embed(1, 5), StepContext())


def test_a_queue_as_long_as_the_set_is_refused() -> None:
    objective = SimilarityKL(queue=100)
    with pytest.raises(BadInput, match="queue 100: expected fewer than the 100 training samples"):
        objective.build(embed(0, 5), embed(1, 5), StepContext(samples=100))
    assert math.isclose(objective.temperature, 0.07)
