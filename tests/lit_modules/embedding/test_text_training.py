"""Nets of texts learn the same on any number of processes, alone and in company; so does a teacher from answers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Pairs
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.embedding.ranking import find_corpus, judge_ranks, rank_documents
from lit_modules.embedding.retrieval import TEMPERATURE, Retrieval
from lit_modules.nets import FastText, Net, RNNClassifier
from lit_modules.nets.embedder import TextEmbedder
from lit_modules.objectives import (
    RKD,
    EmbeddingMatch,
    MarginMSE,
    Objective,
    ScoreKL,
    SimilarityKL,
    TokenMatch,
    Untrained,
)
from tests.formulas import assert_equal
from tests.grids import mostly_slow
from tests.texts_in_rows import read_rows, text_rows
from tests.training import assert_agree, assert_same, fit, on, outcome, trainer, weights

METHODS: dict[str, Callable[[], Objective]] = {
    "match": EmbeddingMatch, "batch": SimilarityKL, "queue": lambda: SimilarityKL(queue=20), "rkd": RKD,
    "margin": MarginMSE, "score": lambda: ScoreKL(candidates="batch"), "untrained": Untrained,
}  # fmt: skip
TAGS = [f"{name}/train/loss" for name in METHODS if name != "untrained"]


class Reranker(Net):
    """Scores (b, k - 1) by a net that reads two texts one after the other."""

    ranks = embeds = True

    def __init__(self, length: int) -> None:
        super().__init__()
        self.net = FastText(8, 64, input_shape=(2 * length,), num_classes=1)

    def forward(self, texts: Tensor) -> Tensor:
        both = torch.cat([texts[:, :1].expand_as(texts[:, 1:]), texts[:, 1:]], 2)
        scores: Tensor = self.net(both.flatten(0, 1)).view(len(texts), -1)
        return scores


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Pairs]:
    folder = tmp_path_factory.mktemp("rows")
    return lambda: read_rows(folder, text_rows(60))


def net(data: Pairs, seed: int = 0, make: Callable[..., nn.Module] = FastText, **options: Any) -> nn.Module:
    options |= {"input_shape": data.input_shape[-1:], "num_classes": 1}
    held = with_seed(seed, lambda: make(**{"width": 8, "buckets": 64} | options if make is FastText else options))
    return TextEmbedder(held, input_shape=data.input_shape)


def module(data: Pairs, *names: str, objectives: dict[str, Objective] | None = None, **nets: Any) -> Distillation:
    methods = objectives or {name: METHODS[name]() for name in names or METHODS}
    students = {name: (nets.get("student") or net(data), objective) for name, objective in methods.items()}
    teacher = nets.get("teacher") or net(data, 1, width=12)
    return Distillation(
        teacher, students, data.input_shape, task=Retrieval(*data.label_shape), input_dtype=torch.uint8,
        samples=data.sizes["train"],
    )  # fmt: skip


@pytest.mark.parametrize("devices", mostly_slow([2, 3], 3))
def test_any_number_of_processes_gives_the_same(devices: int, data: Callable[[], Pairs], tmp_path: Path) -> None:
    one, several = (outcome(module(data()), data(), tmp_path, TAGS, n, precision="64-true") for n in (1, devices))
    assert_agree(one, several)


def test_a_teacher_learns_from_answers_on_any_number_of_processes(data: Callable[[], Pairs], tmp_path: Path) -> None:
    def teacher() -> LitClassifier:
        return LitClassifier(net(data()), task=Retrieval(3))

    one, three = (outcome(teacher(), data(), tmp_path, ["train/loss"], n, precision="64-true") for n in (1, 3))
    assert_agree(one, three)
    assert one[0][-1] < one[0][0]
    bits = [outcome(teacher(), data(), tmp_path, ["train/loss"], **on(f"ddp {n} exact 4")) for n in (1, 2)]
    assert bits[0][0] == bits[1][0]
    assert_same(bits[0][1], bits[1][1])


def test_exact_gives_the_same_bits(data: Callable[[], Pairs], tmp_path: Path) -> None:
    one, two = (outcome(module(data()), data(), tmp_path, TAGS, **on(f"ddp {n} exact 4")) for n in (1, 2))
    assert one[0] == two[0]
    assert_same(one[1], two[1])


def test_alone_is_as_in_company(data: Callable[[], Pairs]) -> None:
    together = weights(fit(module(data()), data()))
    for name in ("queue", "rkd", "score"):
        alone = weights(fit(module(data(), name), data()))
        assert_same(alone, {key: together[key] for key in alone})


def test_a_net_that_reads_one_text_a_time_learns_relations(data: Callable[[], Pairs], tmp_path: Path) -> None:
    """Its features are of rows, as those of a batch are gathered by rows."""
    nets = [module(data(), "rkd", student=net(data(), make=RNNClassifier, hidden=4)) for _ in range(2)]
    one, two = (outcome(m, data(), tmp_path, ["rkd/train/loss"], n, precision="64-true") for n, m in enumerate(nets, 1))
    assert_agree(one, two)


@pytest.mark.parametrize("devices", [1, 2])
def test_scores_are_those_of_the_whole_set(devices: int, data: Callable[[], Pairs]) -> None:
    students, rows = module(data()), data()
    (scores,) = trainer(devices).test(students, rows, verbose=False)
    inputs, numbers = rows.samples("test", torch.arange(rows.sizes["test"]))
    texts, corpus = students.students["match"].net.eval()(inputs).detach().flatten(0, 1), find_corpus(numbers)
    ranks = rank_documents(texts[corpus.queries], texts[corpus.documents], corpus)
    values = judge_ranks(ranks, corpus.pairs[:, 0])
    for name, value in values.items():
        assert scores[f"match/test/{name}"] == pytest.approx(float(value.mean()), abs=1e-12)


@pytest.mark.parametrize("student", ["embeds", "ranks"])
def test_one_net_may_score_pairs_and_the_other_embed(student: str, data: Callable[[], Pairs], tmp_path: Path) -> None:
    rows = data()
    kinds = {"embeds": net(rows), "ranks": TextEmbedder(Reranker(rows.input_shape[1]), rows.input_shape)}
    other = next(kinds[kind] for kind in kinds if kind != student)
    assert TextEmbedder(Reranker(rows.input_shape[1]), rows.input_shape)(rows.example).shape == (2, 2)
    for name, make in {"margin": MarginMSE, "score": ScoreKL}.items():

        def students(objective: Objective, name: str = name) -> Distillation:
            return module(rows, objectives={name: objective}, student=copy.deepcopy(kinds[student]), teacher=other)

        tags = [f"{name}/train/loss"]
        one, two = (outcome(students(make()), data(), tmp_path, tags, n, precision="64-true") for n in (1, 2))
        assert_agree(one, two)
        trained, begun = one[1], kinds[student].state_dict()
        assert any(not torch.equal(trained[f"students.{name}.net.{key}"], x) for key, x in begun.items())
        (scores,) = trainer().test(students(make()), data(), verbose=False)
        assert 0 < scores[f"{name}/test/rerank"] <= 1


@pytest.mark.parametrize(
    ("students", "line"),
    [
        ({"match": ("ranks", EmbeddingMatch)}, "variants.match EmbeddingMatch: expected a method of scores"),
        ({"a": ("embeds", MarginMSE), "b": ("ranks", MarginMSE)}, "variants.b TextEmbedder: expected students that"),
        ({"token": ("embeds", TokenMatch)}, "variants.token TokenMatch: expected a method that compares scores"),
    ],
)  # fmt: skip
def test_what_can_not_be_learned_is_refused(students: Any, line: str, data: Callable[[], Pairs]) -> None:
    rows = data()

    def made(kind: str) -> nn.Module:
        return net(rows) if kind == "embeds" else TextEmbedder(Reranker(rows.input_shape[1]), rows.input_shape)

    nets = {name: (made(kind), make()) for name, (kind, make) in students.items()}
    teacher = made("ranks" if next(iter(students.values()))[0] == "ranks" else "embeds")
    with pytest.raises(BadInput, match=line):
        Distillation(teacher, nets, rows.input_shape, task=Retrieval(3), input_dtype=torch.uint8)


def test_the_loss_of_answers_is_their_cross_entropy_among_the_batch() -> None:
    """Rows of an equal query, and texts that are the answer, are no negatives of it."""
    numbers = torch.tensor([[0, 1, 2], [3, 4, 1], [0, 5, 2], [6, 7, 8]])
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = []
    for row in range(4):
        query, answer = numbers[row, 0], numbers[row, 1]
        answers = {int(other[1]) for other in numbers if other[0] == query}
        kept = [int(answer)] + [int(n) for other in numbers for n in other[1:] if n != answer]
        kept = [n for i, n in enumerate(kept) if not i or n not in answers]
        cosines = torch.stack([F.cosine_similarity(x[query], x[n], dim=0) for n in kept]) / TEMPERATURE
        losses.append(cosines.logsumexp(0) - cosines[0])
    assert_equal(Retrieval(3).loss(x[numbers], numbers), torch.stack(losses), x, atol=1e-9)


def test_rows_without_answers_teach_nothing() -> None:
    for task, outputs in ((Retrieval(1), (4, 1, 3)), (Retrieval(2, scored=True), (4, 2, 3)), (Retrieval(3), (4, 2))):
        with pytest.raises(BadInput, match="teacher a new net: expected one that is loaded"):
            task.loss(torch.randn(*outputs), torch.zeros(4, task.texts, dtype=torch.int64))
