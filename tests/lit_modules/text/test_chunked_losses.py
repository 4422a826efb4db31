"""Losses in chunks of tokens are those of all logits at once: values, gradients, on any number of processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from harness.studies.operations import flops
from lit_modules.distillation import Distillation
from lit_modules.nets import Ensemble
from lit_modules.nets.token_head import find_token_head
from lit_modules.tasks import Tokens
from lit_modules.text.token_losses import _Chunks
from tests.grids import mostly_slow
from tests.language import gpt, text
from tests.lit_modules.text import test_masked_tokens as masked
from tests.lit_modules.text.test_masked_tokens import SHAPES, B, T, V
from tests.training import assert_same, fit, on, weights

NAMES = "ce", "smooth", "kd", "reverse", "gkd", "skew", "akl", "tv", "dkd", "mse", "sum", "ctkd"
# Cosine reads a layer, so its logits are computed for all tokens.
OBJECTIVES = {**{name: masked.OBJECTIVES[name] for name in NAMES}, "cosine": masked.WHOLE["cosine"]}


def texts(ignored: bool = True) -> tuple[Tensor, Tensor]:
    tokens, labels = masked.texts()
    return tokens, labels if ignored else labels.clamp(min=0)


def module(size: int, *names: str, tied: bool = True, teacher: nn.Module | None = None) -> Distillation:
    students = {name: (gpt(V, T, num_layers=1, tie_weights=tied), OBJECTIVES[name]()) for name in names or OBJECTIVES}
    made = Distillation(teacher or gpt(V, T, seed=1), students, **SHAPES, loss_chunk=size)
    return made.double().train()


def step(made: Distillation, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, the values of terms and the gradients."""
    batch = Batch.of((tokens, labels), 0)
    loss, values = made.losses(made(tokens), batch)
    loss.backward()
    return loss, values, {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_are_those_of_all_tokens_at_once(size: int, ignored: bool, tied: bool) -> None:
    (loss, values, gradients), plain = (step(module(n, tied=tied), *texts(ignored)) for n in (size, 0))
    torch.testing.assert_close(loss, plain[0], rtol=1e-12, atol=1e-12)
    assert values.keys() == plain[1].keys()
    for found, expected in ((values, plain[1]), (gradients, plain[2])):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_texts_that_count_alike_whatever_their_lengths() -> None:
    tokens, labels = texts()
    counts = (labels >= 0).double()
    weight = B / 4 * T * counts / counts.sum(1, keepdim=True).clamp(min=1)
    batch, found = Batch.of((tokens, labels), 0)._replace(label_weight=weight), []
    for size in (0, 3):
        made = module(size, "kd", "gkd")
        loss, values = made.losses(made(tokens), batch)
        loss.backward()
        found.append({"loss": loss.detach(), **values, **{k: p.grad for k, p in made.students.named_parameters()}})
    assert_same(*found, atol=1e-12)


def test_no_logits_of_all_tokens_are_computed() -> None:
    made, tokens = module(4, "kd", "ce"), texts()[0]
    teacher, students = made(tokens)
    for outputs in (teacher, *students.values()):
        assert outputs.hidden
        assert outputs.logits.is_meta
        assert (outputs.hidden.inputs.shape, outputs.logits.shape) == ((B, T, 12), (B, T, V))
    assert made.train(False).predict(tokens)["kd"].shape == (B, T, V)


def test_a_student_has_the_same_bits_in_company() -> None:
    together, alone = (step(module(3, *names).float(), *texts())[2] for names in ((), ("gkd",)))
    assert_same({k: v for k, v in together.items() if ".gkd." in k}, alone)


def test_a_batch_without_a_label_has_a_loss_of_zero() -> None:
    tokens, labels = texts()
    loss, values, gradients = step(module(3, "kd"), tokens, torch.full_like(labels, IGNORED))
    assert loss == 0
    assert "kd/bpc" in values
    assert all(not x.any() for x in gradients.values())


def test_under_autocast_they_are_those_of_16_bits() -> None:
    made = {}
    for size in (0, 3):
        with torch.autocast("cpu", torch.bfloat16):
            made[size] = step(module(size, "kd", "gkd").float(), *texts())
    torch.testing.assert_close(made[3][0], made[0][0], rtol=1e-3, atol=1e-3)
    for name, x in made[3][2].items():
        torch.testing.assert_close(x, made[0][2][name], rtol=0.05, atol=3e-3)


def test_slopes_that_float16_cannot_hold_reach_the_weights() -> None:
    """Backward scales losses, as its precision needs; what the forward makes before that must not be 0."""
    batch, scale, gradients = Batch.of(texts(), 0), 2.0**16, list[Tensor]()
    batch = batch._replace(label_weight=1e-7 * torch.as_tensor(batch.label_weight))
    for size, kind in ((3, torch.float16), (3, torch.float32)):
        made = module(size, "kd").float()
        with torch.autocast("cpu", torch.float16, enabled=kind == torch.float16):
            loss, _ = made.losses(made(batch.inputs), batch)
        (loss * scale).backward()
        tiny = torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]) / scale
        gradients.append(tiny)
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()


def test_gradients_of_heads_in_float16_are_scaled_before_they_are_rounded() -> None:
    hidden, weight = (torch.randn(n, 4).half().requires_grad_() for n in (6, 5))

    def terms(i: int, logits: Tensor, teacher: Any, part: slice) -> Tensor:
        return (logits * 1e-9).sum()

    (loss,) = _Chunks.apply(terms, SimpleNamespace(of_chunk=lambda part: None), 2, hidden, weight, None)
    (loss * 2.0**26).backward()
    expected = 1e-9 * 2.0**26 * weight.detach().float().sum(0).expand(6, -1)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.float(), expected, rtol=2e-3, atol=1e-6)


def test_an_ensemble_and_a_net_that_changes_its_logits_give_them_all() -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt(V, T)

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.tanh(self.net(tokens))

    assert find_token_head(Capped(), texts()[0]) is None
    for teacher in (Capped(), Ensemble([gpt(V, T, seed=1), gpt(V, T, seed=2)])):
        one, other = (step(module(n, "kd", "gkd", teacher=teacher), *texts()) for n in (3, 0))
        assert_same(one[2], other[2], atol=1e-12)


def test_the_cost_of_a_step_can_be_counted() -> None:
    """FlopCounterMode puts hooks on what modules are called with."""
    batch, counted = Batch.of(texts(ignored=False), 0), []
    for size in (3, 0):
        made = module(size, "gkd")
        step_of_one = made.timed_steps("gkd", batch)[0.0]
        counted.append(flops(step_of_one))
    assert counted[0] == counted[1]


def test_a_size_below_zero_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^loss_chunk -1: expected a number of tokens, or 0 for all of a batch at once"):
        module(-1, "kd")


def ended(folder: Path, place: str = "auto 1", size: int = 5, **options: Any) -> dict[str, Tensor]:
    data = text(folder)
    nets = {name: (gpt(**data.net_arguments, num_layers=1), OBJECTIVES[name]()) for name in ("ce", "gkd", "cosine")}
    shape = {"input_shape": data.input_shape, "num_classes": data.num_classes, "task": Tokens()}
    shape["input_dtype"] = torch.int64
    made = Distillation(gpt(**data.net_arguments, seed=1), nets, **shape, loss_chunk=size)
    return weights(fit(made, data, **{"precision": "64-true", "max_epochs": 1} | on(place) | options))


@pytest.mark.parametrize("place", mostly_slow(["ddp 3", "ddp 2 exact 4", "fsdp 2"], "ddp 3"))
def test_any_number_of_processes_has_the_weights_of_plain_losses(place: str, tmp_path: Path) -> None:
    assert_same(ended(tmp_path, size=0), ended(tmp_path, place), atol=1e-9)


@pytest.mark.slow
def test_exact_bits_are_those_of_one_process(tmp_path: Path) -> None:
    one, two = (ended(tmp_path, f"ddp {n} exact 4", precision="32-true") for n in (1, 2))
    assert_same(one, two)
