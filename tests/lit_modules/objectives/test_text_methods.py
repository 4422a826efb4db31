"""Methods that learn from rows of texts: each text is a sample, and scores of candidates equal their formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets import Outputs
from lit_modules.objectives import (
    CC,
    PKT,
    RKD,
    SP,
    EmbeddingMatch,
    Hinton,
    MarginMSE,
    Objective,
    ScoreKL,
    SimilarityKL,
    Sum,
    TokenMatch,
    Untrained,
)
from lit_modules.objectives.context import StepContext, call
from tests.formulas import assert_equal, total

B, K, D = 4, 3, 5
WITHOUT_LABELS = StepContext(samples=100, has_labels=False)
LABELS = torch.arange(B * K).view(B, K) + 1000  # numbers of texts, no classes


def outputs(seed: int, *shape: int) -> Outputs:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    return Outputs(x, {"pooled": x, "default": x})


def as_samples(texts: Outputs) -> Outputs:
    x = texts.logits.flatten(0, 1)
    return Outputs(x, {"pooled": x, "default": x})


def loss(objective: Objective, student: Outputs, teacher: Outputs, labels: Tensor) -> Tensor:
    return total(objective.terms(objective.adapt(student), teacher, labels, WITHOUT_LABELS))


METHODS: dict[str, Callable[[], Objective]] = {
    "cosine": EmbeddingMatch, "l2": lambda: EmbeddingMatch("l2"), "mse": lambda: EmbeddingMatch("mse", project=True),
    "kl": SimilarityKL, "queue": lambda: SimilarityKL(queue=9), "long": lambda: SimilarityKL(queue="auto"),
    "rkd": RKD, "sp": SP, "pkt": PKT, "cc": CC,
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_each_text_of_a_row_is_a_sample(name: str) -> None:
    """Values, gradients and the queue are those of as many samples; the number of a text is no class."""
    student, teacher = outputs(0, B, K, D), outputs(1, B, K, D)
    of_texts, of_samples = METHODS[name](), METHODS[name]()
    samples = StepContext(samples=WITHOUT_LABELS.samples and WITHOUT_LABELS.samples * K, has_labels=False)
    torch.manual_seed(0)
    call(of_texts.build, student, teacher, context=WITHOUT_LABELS)
    torch.manual_seed(0)
    call(of_samples.build, as_samples(student), as_samples(teacher), context=samples)
    for _ in range(2):
        ours = loss(of_texts.double(), student, teacher, LABELS)
        theirs = loss(of_samples.double(), as_samples(student), as_samples(teacher), LABELS.flatten())
        assert_equal(ours, theirs, student.logits)
        of_texts.after_batch(student, teacher, LABELS)
        of_samples.after_batch(as_samples(student), as_samples(teacher), LABELS.flatten())
    for one, other in zip(of_texts.buffers(), of_samples.buffers(), strict=True):
        assert torch.equal(one, other)


def score(similarity: str, query: Tensor, text: Tensor) -> Tensor:
    return query @ text / (query.norm() * text.norm() if similarity == "cosine" else 1)


def rows_of_scores(kind: str, net: Outputs, similarity: str) -> list[list[Tensor]]:
    if kind == "scores":
        return [list(row) for row in net.logits]
    return [[score(similarity, row[0], text) for text in row[1:]] for row in net.logits]


def margins(s: list[Tensor], t: list[Tensor]) -> Tensor:
    return torch.stack([((s[0] - s[j]) - (t[0] - t[j])) ** 2 for j in range(1, len(s))]).mean()


def divergence(s: list[Tensor], t: list[Tensor]) -> Tensor:
    p, q = ([(x / temperature).exp() for x in row] for row, temperature in ((t, 0.5), (s, 2.0)))
    shares = zip([x / sum(p) for x in p], [x / sum(q) for x in q], strict=True)
    return 4 * torch.stack([a * (a / b).log() for a, b in shares]).sum()


SCORED: dict[str, tuple[Callable[..., Objective], Callable]] = {
    "margin": (MarginMSE, margins), "kl": (lambda **options: ScoreKL(2.0, 0.5, **options), divergence),
}  # fmt: skip
SHAPES = {"embeddings": (B, 4, D), "scores": (B, 3)}


@pytest.mark.parametrize("teacher", SHAPES)
@pytest.mark.parametrize("student", SHAPES)
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("name", SCORED)
def test_scores_are_compared_by_formula(name: str, similarity: str, student: str, teacher: str) -> None:
    """Of two nets that embed, two cross-encoders, and one of each."""
    (make, formula), s, t = SCORED[name], outputs(0, *SHAPES[student]), outputs(1, *SHAPES[teacher])
    objective = make(similarity=similarity)
    objective.build(s, t)
    rows = zip(rows_of_scores(student, s, similarity), rows_of_scores(teacher, t, similarity), strict=True)
    assert_equal(loss(objective, s, t, LABELS), torch.stack([formula(*row) for row in rows]).mean(), s.logits)


def test_candidates_may_be_those_of_the_whole_batch() -> None:
    s, t = outputs(0, B, K, D), outputs(1, B, K, D)
    objective = ScoreKL(2.0, 0.5, candidates="batch")
    objective.build(s, t)
    assert objective.relates_rows
    rows = [[[row[0] @ text for other in net.logits for text in other[1:]] for row in net.logits] for net in (s, t)]
    expected = torch.stack([divergence(*row) for row in zip(*rows, strict=True)]).mean()
    assert_equal(loss(objective, s, t, LABELS), expected, s.logits)


def test_methods_say_what_they_compare() -> None:
    assert MarginMSE().compares == ScoreKL().compares == Sum([ScoreKL(), RKD()]).compares == {"scores"}
    assert all("scores" in make().compares for make in (EmbeddingMatch, SimilarityKL, RKD, SP, PKT, CC, Untrained))
    assert all("scores" not in make().compares for make in (Hinton, TokenMatch))


@pytest.mark.parametrize(
    ("objective", "student", "teacher", "line"),
    [
        (MarginMSE(), (B, 2, D), (B, 2, D), "MarginMSE: expected rows with at least 2 candidates, a"),
        (MarginMSE(), (B, 1, D), (B, 1, D), "at least 2 candidates, a positive and a negative; these have 0"),
        (ScoreKL(), (B, 1), (B, 2, D), "ScoreKL: expected rows with at least 2 candidates, or `candidates batch`"),
        (ScoreKL(candidates="batch"), (B, 2, D), (B, 1), "candidates batch: expected row: a cross-encoder"),
        (ScoreKL(), (B, 3), (B, 3, D), "ScoreKL: expected a teacher that scores 3 candidates a row; it gives 2"),
        (EmbeddingMatch(), (B, 3, D), (B, 2), "EmbeddingMatch: expected a method of scores, such as ScoreKL"),
        (SimilarityKL(queue=300), (B, 3, D), (B, 3, D), "queue 300: expected fewer than the 300 training samples"),
    ],
)  # fmt: skip
def test_nets_that_do_not_fit_are_refused(objective: Any, student: Any, teacher: Any, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        call(objective.build, outputs(0, *student), outputs(1, *teacher), context=WITHOUT_LABELS)


def test_options_that_can_not_be_used_are_refused() -> None:
    for make, line in (
        (lambda: MarginMSE(similarity="l2"), "similarity l2: expected dot or cosine"),  # type: ignore[arg-type]
        (lambda: ScoreKL(candidates="all"), "candidates all: expected row or batch"),  # type: ignore[arg-type]
        (lambda: ScoreKL(temperature=0), "temperature 0: expected a number above 0"),
    ):
        with pytest.raises(BadInput, match=line):
            make()
