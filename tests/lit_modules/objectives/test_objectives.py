"""Each objective equals a formula written out independently in float64, gradients included."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules import objectives
from lit_modules.nets import Outputs
from tests.formulas import assert_equal, total

B, C = 7, 10
HEADS = ("head", "head_dist")


def outputs(seed: int, channels: int, size: int = 4, scale: float = 3.0, heads: Sequence[str] = ()) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(B, C, generator=g, dtype=torch.float64) * scale).requires_grad_()
    features = torch.randn(B, channels, size, size, generator=g, dtype=torch.float64).requires_grad_()
    found = {head: torch.randn(B, C, generator=g, dtype=torch.float64).requires_grad_() for head in heads}
    return Outputs(logits, {"default": features, **found})


def labels() -> torch.Tensor:
    return torch.randint(C, (B,), generator=torch.Generator().manual_seed(9))


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
    if name in {"reverse", "js"}:
        p, q = (log_softmax(z / 2).exp() for z in (t.logits, s.logits))
        soft = 4 * (q * (q.log() - p.log())).sum() / B
    if name == "js":
        m = 0.3 * p + 0.7 * q
        soft = 4 * (0.3 * (p * (p / m).log()).sum() + 0.7 * (q * (q / m).log()).sum()) / B
    if name.startswith("deit"):
        token = s.features["head_dist"]
        p = log_softmax(t.logits / 3).exp()
        soft = 9 * (p * (p.log() - log_softmax(token / 3))).sum() / B
        soft = cross_entropy(token, t.logits.max(1).indices) if name == "deit hard" else soft
        return 0.5 * soft + 0.5 * cross_entropy(s.features["head"], y) + 0 * s.logits.sum()
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


METHODS: dict[str, Callable[[], objectives.Objective]] = {
    "ce": objectives.CrossEntropy,
    "kd": objectives.Hinton,
    "cosine": objectives.Cosine,
    "hint": objectives.Hint,
    "reverse": objectives.ReverseKL,
    "js": lambda: objectives.JensenShannon(beta=0.3),
    "deit hard": objectives.DeiTToken,
    "deit soft": lambda: objectives.DeiTToken("soft"),
}


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_formula_and_its_gradients(name: str) -> None:
    student, teacher, y = outputs(1, 3, heads=HEADS), outputs(2, 6), labels()
    objective = METHODS[name]()
    objective.build(student, teacher)
    objective.double()
    wanted = [student.logits, *student.features.values(), *objective.parameters()]
    theirs = by_hand(name, student, teacher, y, getattr(objective, "regressor", None))
    assert_equal(total(objective(objective.adapt(student), teacher, y)), theirs, wanted)


def in_bfloat16(x: Outputs, noise: float = 0.0) -> Outputs:
    """What nets give under autocast; with noise of a few bits, a net that is close to them."""
    g = torch.Generator().manual_seed(5)
    near = {
        k: v.detach() * (1 + noise * torch.randn(v.shape, generator=g)) for k, v in {"": x.logits, **x.features}.items()
    }
    found = {k: v.bfloat16().requires_grad_() for k, v in near.items()}
    return Outputs(found.pop(""), found)


def in_float64(x: Outputs) -> Outputs:
    return x.map(lambda v: v.detach().double().requires_grad_())


# Not hint, whose regressor computes in bfloat16, as layers do
@pytest.mark.parametrize("name", [name for name in METHODS if name != "hint"])
def test_autocast_rounds_no_total(name: str) -> None:
    whole = outputs(1, 6, scale=1.0, heads=HEADS)
    student, y = in_bfloat16(whole, noise=0.01), labels()
    near = whole.features["head_dist"] if "deit" in name else whole.logits
    teacher = in_bfloat16(Outputs(near, {"default": whole.features["default"].repeat_interleave(2, -1)}))
    with torch.autocast("cpu", torch.bfloat16):
        terms = METHODS[name]().terms(student, teacher, y)
    found = total(terms)
    s, t = in_float64(student), in_float64(teacher)
    expected = by_hand(name, s, t, y, None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    found.backward()
    expected.backward()
    for key, x in {"": student.logits, **student.features}.items():
        right = s.features[key].grad if key else s.logits.grad
        if right is not None:  # the gradient itself is rounded to its tensor's bfloat16
            torch.testing.assert_close(x.grad.double(), right, rtol=2**-8, atol=1e-6)
    assert all((term.values >= 0).all() for term in terms.values())


def test_a_hint_is_compared_in_float32() -> None:
    student, teacher = in_bfloat16(outputs(1, 3)), in_bfloat16(outputs(2, 6))
    objective = objectives.Hint()
    objective.build(student, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        adapted = objective.adapt(student)
        found = objective.terms(adapted, teacher, labels())["hint"].values
    assert adapted.features["default"].dtype == torch.bfloat16
    f_s, f_t = (x.features["default"].double() for x in (adapted, teacher))
    torch.testing.assert_close(found.double(), (f_s - f_t).square().mean((1, 2, 3)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", METHODS)
def test_extreme_teachers_give_finite_losses_and_gradients(name: str) -> None:
    student = outputs(1, 6, heads=HEADS)
    signs = torch.where(torch.rand(B, C, generator=torch.Generator().manual_seed(3)) < 0.5, -1e4, 1e4).double()
    teacher = Outputs(signs, {"default": torch.full((B, 6, 4, 4), 1e4, dtype=torch.float64)})
    objective = METHODS[name]()
    objective.build(student, teacher)
    objective.double()
    found = total(objective(objective.adapt(student), teacher, labels()))
    found.backward()
    assert torch.isfinite(found)
    for x in (student.logits, *student.features.values()):
        assert x.grad is None or torch.isfinite(x.grad).all()


def test_jensen_shannon_lies_between_the_two_directions() -> None:
    """Paper, section 3: its ends, divided by beta or 1 - beta, are the two KL divergences."""
    student, teacher, y = outputs(1, 3, scale=1.0), outputs(2, 3, scale=1.0), labels()
    ends = {1e-7: (objectives.Hinton(), "kd"), 1 - 1e-7: (objectives.ReverseKL(), "reverse")}
    for beta, (other, name) in ends.items():
        ours = objectives.JensenShannon(beta)(student, teacher, y)["js"].values / min(beta, 1 - beta)
        torch.testing.assert_close(ours, other(student, teacher, y)[name].values, rtol=1e-5, atol=0)
    forth, back = (
        objectives.JensenShannon(0.5)(*pair, y)["js"].values for pair in ((student, teacher), (teacher, student))
    )
    torch.testing.assert_close(forth, back, rtol=0, atol=1e-14)


@pytest.mark.parametrize("path", ["default", "head"])
def test_a_distillation_head_gives_logits(path: str) -> None:
    name = "student_layer" if path == "default" else "class_layer"
    student = outputs(1, 3, heads=HEADS)
    student.features["head"] = student.features["head"][:, :3]
    with pytest.raises(BadInput, match=rf"^{name} {path}: expected a head that gives logits \(10,\); .* \(3,"):
        objectives.DeiTToken(student_layer="default" if path == "default" else "head_dist").build(
            student, outputs(2, 6)
        )


def test_the_teachers_entropy_moves_the_value_and_no_gradient() -> None:
    found = []
    for counted in (False, True):
        student, teacher, y = outputs(1, 3), outputs(2, 3), labels()
        value = total(objectives.Hinton(3.0, 0.6, 0.4, teacher_entropy=counted)(student, teacher, y))
        value.backward()
        found.append((value.detach(), student.logits.grad))
    p, log_q = log_softmax(teacher.logits / 3).exp(), log_softmax(student.logits / 3)
    expected = 0.6 * 9 * -(p * log_q).sum() / B + 0.4 * cross_entropy(student.logits, y)
    torch.testing.assert_close(found[1][0], expected.detach(), rtol=1e-14, atol=0)
    assert found[1][0] > found[0][0]
    assert torch.equal(found[0][1], found[1][1])


def test_sum_adds_its_parts_with_their_weights() -> None:
    student, teacher, y = outputs(1, 3), outputs(2, 6), labels()
    both = objectives.Sum([objectives.Hinton(), objectives.Cosine()], weights=[2.0, 0.5])
    both.build(student, teacher)
    parts = 2 * total(objectives.Hinton()(student, teacher, y)) + 0.5 * total(objectives.Cosine()(student, teacher, y))
    torch.testing.assert_close(total(both(student, teacher, y)), parts, rtol=0, atol=1e-12)
    assert list(both(student, teacher, y)) == ["0.kd", "0.ce", "1.cosine", "1.ce"]


def hint(seed: int) -> objectives.Hint:
    objective = objectives.Hint()
    with_seed(seed, lambda: objective.build(outputs(1, 3), outputs(2, 6)))
    return objective.double()


def test_each_part_of_a_sum_sees_the_features_that_it_has_adapted_and_else_the_students_own() -> None:
    student, teacher, y = outputs(1, 3), outputs(2, 6), labels()
    alone = [hint(0), objectives.Cosine(), hint(1), hint(2)]
    both = objectives.Sum([hint(0), objectives.Sum([objectives.Cosine(), hint(1)]), hint(2)]).double()
    assert [tuple(part.weight.shape) for part in both.parts()] == [(6, 3, 3, 3)] * 3
    assert list(both.state_dict())[:2] == ["objectives.0.regressor.weight", "objectives.0.regressor.bias"]
    expected = [total(o(o.adapt(student), teacher, y)) for o in alone]
    terms = both(both.adapt(student), teacher, y)
    found = [total({k: t for k, t in terms.items() if k.startswith(part)}) for part in ("0.", "1.0.", "1.1.", "2.")]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    adapted = both.adapt(student)
    assert list(adapted.features) == ["default"]
    assert list(adapted.condensed) == [("0", "default"), ("1", "1", "default"), ("2", "default")]


def test_cosine_pools_any_sizes_to_the_shorter() -> None:
    student, teacher = outputs(1, 5), outputs(2, 3)  # 80 against 48 values
    f_s = F.adaptive_avg_pool1d(student.features["default"].flatten(1)[:, None], 48)[:, 0].detach().numpy()
    f_t = teacher.features["default"].flatten(1).detach().numpy()
    cos = (f_s * f_t).sum(1) / np.linalg.norm(f_s, axis=1) / np.linalg.norm(f_t, axis=1)
    ours = objectives.Cosine()(student, teacher, labels())["cosine"].values.detach().numpy()
    np.testing.assert_allclose(ours, 1 - cos, atol=1e-12)


def test_hint_refuses_maps_of_other_sizes_naming_both() -> None:
    with pytest.raises(BadInput, match=r"\(3, 4, 4\).*\(6, 8, 8\)"):
        objectives.Hint().build(outputs(1, 3, size=4), outputs(2, 6, size=8))


NAN = float("nan")
REFUSED: list[tuple[Callable[..., objectives.Objective], dict[str, Any], str]] = [
    (objectives.Hinton, {"temperature": 0}, ""),
    (objectives.Hinton, {"temperature": NAN}, ""),
    (objectives.Hinton, {"kd_weight": -1}, ""),
    (objectives.Cosine, {"cosine_weight": -0.1}, ""),
    (objectives.Hint, {"hint_weight": float("inf")}, ""),
    (objectives.ReverseKL, {"temperature": -1}, ""),
    (objectives.ReverseKL, {"reverse_weight": -1}, ""),
    (objectives.JensenShannon, {"beta": 0}, ""),
    (objectives.JensenShannon, {"beta": 1.0}, ""),
    (objectives.JensenShannon, {"js_weight": NAN}, ""),
    (objectives.DeiTToken, {"kind": "both"}, ""),
    (objectives.DeiTToken, {"token_weight": -1}, ""),
    (objectives.DeiTToken, {"kind": "soft", "temperature": 0}, ""),
    (objectives.Sum, {"objectives": []}, ""),
    (objectives.Sum, {"objectives": [objectives.Hinton()], "weights": [1.0, 2.0]}, ""),
    (objectives.Sum, {"objectives": [objectives.Hinton()], "weights": [-1.0]}, ""),
    (objectives.DKD, {"warmup": -1}, "warmup -1: expected a number of epochs, 0 or more"),
    (objectives.TTM, {"gamma": 0}, "gamma 0: expected a number above 0, at most 1"),
    (objectives.TfKD, {"correct": 1.0}, "correct 1.0: expected a probability above 0 and below 1"),
    (objectives.TfKD, {"alpha": 1.5}, "alpha 1.5: expected a number from 0 to 1"),
    (objectives.CrossEntropy, {"label_smoothing": 1.0}, "label_smoothing 1.0: expected a share of 0 or more, below 1"),
    (objectives.NKD, {"gamma": NAN}, "gamma nan: expected a number of 0 or more"),
]


@pytest.mark.parametrize(("make", "options", "line"), REFUSED)
def test_bad_options_are_refused(make: Callable[..., objectives.Objective], options: dict, line: str) -> None:
    with pytest.raises(BadInput, match=r"^\w+ .*: expected ") as fault:
        make(**options)
    assert str(fault.value) == line or not line
