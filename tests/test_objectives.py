"""Each objective equals a formula written out independently in float64, gradients included."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import seeded
from lit_modules.nets import Outputs
from lit_modules.objectives import Cosine, CrossEntropy, Hint, Hinton, Objective, Sum, Term

B, C = 7, 10


def outputs(seed: int, channels: int, size: int = 4, scale: float = 3.0) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(B, C, generator=g, dtype=torch.float64) * scale).requires_grad_()
    features = torch.randn(B, channels, size, size, generator=g, dtype=torch.float64).requires_grad_()
    return Outputs(logits, {"default": features})


def labels() -> torch.Tensor:
    return torch.randint(C, (B,), generator=torch.Generator().manual_seed(9))


def loss(terms: dict[str, Term]) -> torch.Tensor:
    return sum((t.values.mean() * t.weight for t in terms.values()), start=torch.zeros((), dtype=torch.float64))


def log_softmax(z: torch.Tensor) -> torch.Tensor:
    return z - z.exp().sum(1, keepdim=True).log()


def cross_entropy(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -sum(log_softmax(z)[i, int(y[i])] for i in range(len(y))) / len(y)


def by_hand(name: str, s: Outputs, t: Outputs, y: torch.Tensor, regressor: torch.nn.Conv2d | None) -> torch.Tensor:
    if name == "ce":
        return cross_entropy(s.logits, y)
    soft = torch.zeros((), dtype=torch.float64)
    if name == "kd":
        temperature = 2
        p = log_softmax(t.logits / temperature).exp()
        soft = temperature**2 * (p * (p.log() - log_softmax(s.logits / temperature))).sum() / B
    if name == "cosine":
        f_s = s.features["default"].reshape(B, -1)
        f_t = t.features["default"].reshape(B, -1, 2).mean(2)  # 2:1, as the tutorial pools
        dot = (f_s * f_t).sum(1)
        soft = (1 - dot / (f_s.square().sum(1) * f_t.square().sum(1)).sqrt()).mean()
    if name == "hint":
        assert regressor is not None
        patches = F.unfold(s.features["default"], 3, padding=1)  # (B, C_s * 9, H * W)
        mapped = regressor.weight.flatten(1) @ patches + regressor.bias[:, None]
        soft = (mapped - t.features["default"].flatten(2)).square().mean()
    return 0.25 * soft + 0.75 * cross_entropy(s.logits, y)


@pytest.mark.parametrize(
    ("name", "make"), [("ce", CrossEntropy), ("kd", Hinton), ("cosine", Cosine), ("hint", Hint)], ids=str
)
def test_equals_the_formula_and_its_gradients(name: str, make: type[Objective]) -> None:
    student, teacher, y = outputs(1, 3), outputs(2, 6), labels()
    objective = make()
    objective.build(student, teacher)
    objective.double()
    wanted = [student.logits, student.features["default"], *objective.parameters()]
    ours = loss(objective(objective.adapt(student), teacher, y))
    grads = torch.autograd.grad(ours, wanted, allow_unused=True)
    theirs = by_hand(name, student, teacher, y, getattr(objective, "regressor", None))
    expected = torch.autograd.grad(theirs, wanted, allow_unused=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for g, e in zip(grads, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            torch.testing.assert_close(g, e, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [CrossEntropy, Hinton, Cosine, Hint])
def test_extreme_teachers_give_finite_losses_and_gradients(make: type[Objective]) -> None:
    student = outputs(1, 6)
    signs = torch.where(torch.rand(B, C, generator=torch.Generator().manual_seed(3)) < 0.5, -1e4, 1e4).double()
    teacher = Outputs(signs, {"default": torch.full((B, 6, 4, 4), 1e4, dtype=torch.float64)})
    objective = make()
    objective.build(student, teacher)
    objective.double()
    total = loss(objective(objective.adapt(student), teacher, labels()))
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(student.logits.grad).all()


def test_kd_is_the_divergence_and_zero_for_equal_logits() -> None:
    same = outputs(1, 3)
    assert Hinton()(same, same, labels())["kd"].values.abs().max() < 1e-15


def test_sum_adds_its_parts_with_their_weights() -> None:
    student, teacher, y = outputs(1, 3), outputs(2, 6), labels()
    both = Sum([Hinton(), Cosine()], weights=[2.0, 0.5])
    both.build(student, teacher)
    parts = 2 * loss(Hinton()(student, teacher, y)) + 0.5 * loss(Cosine()(student, teacher, y))
    torch.testing.assert_close(loss(both(student, teacher, y)), parts, rtol=0, atol=1e-12)
    assert list(both(student, teacher, y)) == ["0.kd", "0.ce", "1.cosine", "1.ce"]


def hint(seed: int) -> Hint:
    objective = Hint()
    seeded(seed, lambda: objective.build(outputs(1, 3), outputs(2, 6)))
    return objective.double()


def test_forward_has_no_parameters_once_features_are_adapted() -> None:
    objective = hint(0)
    adapted = objective.adapt(outputs(1, 3))
    assert adapted.features["default"].shape == (B, 6, 4, 4)
    del objective.regressor
    assert torch.isfinite(loss(objective(adapted, outputs(2, 6), labels())))
    assert hint(0).parts()[0].weight.shape == (6, 3, 3, 3)


def test_each_part_of_a_sum_sees_the_features_that_it_has_adapted_and_else_the_students_own() -> None:
    student, teacher, y = outputs(1, 3), outputs(2, 6), labels()
    alone = [hint(0), Cosine(), hint(1), hint(2)]
    both = Sum([hint(0), Sum([Cosine(), hint(1)]), hint(2)]).double()
    assert [tuple(part.weight.shape) for part in both.parts()] == [(6, 3, 3, 3)] * 3
    assert list(both.state_dict())[:2] == ["objectives.0.regressor.weight", "objectives.0.regressor.bias"]
    expected = [loss(o(o.adapt(student), teacher, y)) for o in alone]
    terms = both(both.adapt(student), teacher, y)
    found = [loss({k: t for k, t in terms.items() if k.startswith(part)}) for part in ("0.", "1.0.", "1.1.", "2.")]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert list(both.adapt(student).features) == ["default", "0>default", "1>1>default", "2>default"]


def test_cosine_pools_any_sizes_to_the_shorter() -> None:
    student, teacher = outputs(1, 5), outputs(2, 3)  # 80 against 48 values
    f_s = F.adaptive_avg_pool1d(student.features["default"].flatten(1)[:, None], 48)[:, 0].detach().numpy()
    f_t = teacher.features["default"].flatten(1).detach().numpy()
    cos = (f_s * f_t).sum(1) / np.linalg.norm(f_s, axis=1) / np.linalg.norm(f_t, axis=1)
    ours = Cosine()(student, teacher, labels())["cosine"].values.detach().numpy()
    np.testing.assert_allclose(ours, 1 - cos, atol=1e-12)


def test_hint_refuses_maps_of_other_sizes_naming_both() -> None:
    with pytest.raises(BadInput, match=r"\(3, 4, 4\).*\(6, 8, 8\)"):
        Hint().build(outputs(1, 3, size=4), outputs(2, 6, size=8))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Hinton, {"temperature": 0}),
        (Hinton, {"temperature": float("nan")}),
        (Hinton, {"kd_weight": -1}),
        (Cosine, {"cosine_weight": -0.1}),
        (Hint, {"hint_weight": float("inf")}),
        (Sum, {"objectives": []}),
        (Sum, {"objectives": [Hinton()], "weights": [1.0, 2.0]}),
        (Sum, {"objectives": [Hinton()], "weights": [-1.0]}),
    ],
)
def test_bad_options_are_refused(make: type[Objective], options: dict) -> None:
    with pytest.raises(BadInput, match=r"^--\w+ .*: expected "):
        make(**options)
