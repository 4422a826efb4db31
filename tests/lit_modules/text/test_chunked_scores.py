"""Scores in chunks of tokens are those of all logits, whose memory they do not take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import Batch
from lit_modules import objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import Ensemble
from lit_modules.objectives import CrossEntropy, Hinton
from lit_modules.tasks import Tokens
from lit_modules.text import chunked_outputs
from tests.chats import chat
from tests.language import gpt
from tests.lit_modules.text.test_masked_tokens import SHAPES, B, T, V
from tests.lit_modules.text.test_masked_tokens import texts as masked_texts
from tests.training import fit, on, trainer


def texts() -> Batch:
    return Batch.of(masked_texts(), 0)


def module(size: int, teacher: nn.Module | None = None, **options: Any) -> Distillation:
    made = {"ce": CrossEntropy(), "kd": Hinton(), "ctkd": objectives.CTKD()}
    made |= {} if isinstance(teacher, Ensemble) else {"cosine": objectives.Cosine()}  # which reads a layer
    students = {name: (gpt(V, T, num_layers=1), objective) for name, objective in made.items()}
    distillation = Distillation(teacher or gpt(V, T, seed=1), students, **SHAPES, loss_chunk=size, **options)
    return distillation.double().eval()


def scores(made: Any) -> dict[str, Tensor]:
    """All values of a validation and a test of the same batch, by run."""
    values, batch = dict[str, Tensor](), texts()
    with torch.no_grad():
        made.on_test_epoch_start()
        made.validation_step(batch, 0)
        made.test_step(batch, 0)
    for run in made.runs:
        values |= {f"{run}/{name}": x for name, x in made.scores_of(run).compute().items()}
    for run, averaged in made.run_scores.averaged.items():
        values |= {f"ema/{run}/{name}": x for name, x in averaged.compute().items()}
    samples = made.run_scores.of_samples(made.failed)
    return values | {f"{run}/{name}": x for run, of in samples.items() for name, x in of.items()}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["teacher", "ensemble", "ema"])
def test_they_are_those_of_all_logits(size: int, kind: str) -> None:
    def made(size: int) -> Distillation:
        teacher = Ensemble([gpt(V, T, seed=1), gpt(V, T, seed=2)]) if kind == "ensemble" else None
        return module(size, teacher, ema=0.9 if kind == "ema" else None)

    plain, chunked = scores(made(0)), scores(made(size))
    assert plain.keys() == chunked.keys()
    assert {"kd/kl", "kd/agreement", "ctkd/loss", "kd/bpc", "ce/tokens"} <= plain.keys()
    for name, values in plain.items():
        torch.testing.assert_close(chunked[name], values, atol=1e-9, rtol=0, msg=name)


def test_alone_and_in_company_they_are_the_same_bits() -> None:
    company = scores(module(3))
    alone = Distillation(gpt(V, T, seed=1), {"kd": (gpt(V, T, num_layers=1), Hinton())}, **SHAPES, loss_chunk=3)
    for name, values in scores(alone.double().eval()).items():
        assert torch.equal(values, company[name]), name


class Scaled(nn.Module):
    """A net whose logits are no linear layer's, so that its scores need them all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt(V, T, num_layers=1)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens) * 2.0
        return logits


def test_a_teachers_logits_are_left_out_beside_students_that_have_theirs() -> None:
    """Or beside none, as all have failed: the teacher's alone are computed in chunks."""

    def made(size: int) -> Distillation:
        scaled = {"kd": (Scaled(), Hinton())}
        return Distillation(gpt(V, T, seed=1), scaled, **SHAPES, loss_chunk=size).double().eval()

    torch.manual_seed(0)
    plain, chunked = made(0), made(3)
    chunked.load_state_dict(plain.state_dict())
    expected, measured = scores(plain), scores(chunked)
    assert expected.keys() == measured.keys()
    for name, values in expected.items():
        torch.testing.assert_close(measured[name], values, atol=1e-9, rtol=0, msg=name)
    chunked.failed = {"kd": {"step": 0, "term": "kd"}}
    chunked.test_step(texts(), 0)


def test_no_logits_of_all_tokens_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that scores see has as many rows as a chunk."""
    from lit_modules.text import token_scores

    rows = []
    usual = token_scores.cross_entropy
    monkeypatch.setattr(
        token_scores, "cross_entropy", lambda z, y: rows.append(len(z)) or usual(z, y)  # type: ignore[func-returns-value]
    )  # fmt: skip
    made = module(3)
    scores(made)
    assert max(rows) == 3
    with torch.no_grad():
        predictions = made.evaluate(texts(), beside=True)
    assert predictions.teacher is not None
    assert all(x.logits.is_meta and x.hidden for x in (predictions.teacher, *predictions.students.values()))
    assert predictions.students["kd"].logits.shape == (B, T, V)
    assert made.predict(texts().inputs)["kd"].isfinite().all()  # what a user asks for has all of its logits


def measure(folder: Path, place: str, large: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(chunked_outputs, "LARGE", large)
    data = chat(folder, validation_size=0)
    net = LitClassifier(gpt(data.num_classes, 512), data.num_classes, task=Tokens.of_data(data))
    return dict(trainer(**on(place), precision="64-true").test(net, data, verbose=False)[0])


@pytest.mark.parametrize("place", ["auto 1", "ddp 3"])
def test_a_classifier_of_tokens_has_them_too(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(tmp_path, "auto 1", 10**9, monkeypatch)
    assert measure(tmp_path, place, 1, monkeypatch) == pytest.approx(whole, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ddp 2", "fsdp 2", "pipeline 2", "ddp 2 exact 3"])
def test_a_distillation_has_them_on_any_strategy(place: str, tmp_path: Path) -> None:
    data = chat(tmp_path, validation_size=0)
    values = []
    for where, size in (("auto 1", 0), (place, 5)):
        students = {"kd": (gpt(data.num_classes, 512, num_layers=1, tie_weights=False), Hinton())}
        shapes = SHAPES | {"input_shape": data.input_shape, "num_classes": data.num_classes}
        made = Distillation(gpt(data.num_classes, 512, seed=1, tie_weights=False), students, **shapes, loss_chunk=size)
        fit(made, data, **on(where), precision="64-true", max_epochs=1)  # type: ignore[arg-type]
        values.append(trainer(**on(where), precision="64-true").test(made, data, verbose=False)[0])
    assert values[1] == pytest.approx(values[0], abs=1e-9)
