"""Each method of logits equals the paper's formula, written out in loops, and stays finite at the extremes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import (
    CTKD,
    DIST,
    DKD,
    GKD,
    NKD,
    RLD,
    TTM,
    AdaptiveKL,
    CrossEntropy,
    DeiTToken,
    Hinton,
    JensenShannon,
    LogitMSE,
    LogitObjective,
    Objective,
    ReverseKL,
    SkewKL,
    Sum,
    Term,
    TfKD,
    TotalVariation,
)
from lit_modules.objectives.context import StepContext
from lit_modules.objectives.logits import temper, zscore
from tests.formulas import assert_equal, total
from tests.training import SHAPE, net

B, C = 6, 5
Loss = Callable[[Tensor, Tensor, int], Tensor]  # of a row's logits and its label


def outputs(seed: int, rows: int = B, classes: int = C, scale: float = 2.0, dtype: Any = torch.float64) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(rows, classes, generator=g, dtype=torch.float64)
    return Outputs(z.to(dtype).requires_grad_(), {})


def labels(rows: int = B) -> Tensor:
    return torch.arange(rows) * 2 % C


def terms(objective: Objective, student: Outputs, teacher: Outputs, y: Tensor, epoch: float = 0.0) -> dict[str, Term]:
    return objective.terms(objective.adapt(student), teacher, y, StepContext(epoch=epoch))


def p(z: Tensor, temperature: float = 1.0) -> Tensor:
    return (z / temperature).exp() / (z / temperature).exp().sum()


def others(z: Tensor, y: int, temperature: float = 1.0) -> Tensor:
    rest = p(z, temperature)[[c for c in range(len(z)) if c != y]]
    return rest / rest.sum()


def kl(a: Tensor, b: Tensor) -> Tensor:
    return sum((a[c] * (a[c] / b[c]).log() for c in range(len(a))), start=torch.zeros(()))


def ce(s: Tensor, t: Tensor, y: int) -> Tensor:
    return -p(s)[y].log()


def dkd(s: Tensor, t: Tensor, y: int) -> Tensor:
    (a, b), pair = (p(z, 4.0)[y] for z in (s, t)), lambda x: torch.stack([x, 1 - x])
    warm = 16 * 3 / 20  # T squared; the third epoch of twenty
    return warm * (kl(pair(b), pair(a)) + 8 * kl(others(t, y, 4.0), others(s, y, 4.0))) + ce(s, t, y)


def nkd(s: Tensor, t: Tensor, y: int) -> Tensor:
    rest = -(others(t, y, 3.0) * others(s, y, 3.0).log()).sum()
    return -p(t)[y] * p(s)[y].log() + 3.5 * 9 * rest + ce(s, t, y)


def ttm(s: Tensor, t: Tensor, y: int) -> Tensor:
    powers = p(t) ** 0.1
    return 45 * kl(powers / powers.sum(), p(s)) + ce(s, t, y)


def wttm(s: Tensor, t: Tensor, y: int) -> Tensor:
    powers = p(t) ** 0.2
    return 4 * powers.sum() * kl(powers / powers.sum(), p(s)) + ce(s, t, y)


def rld(s: Tensor, t: Tensor, y: int, scd: float = 1.0) -> Tensor:
    top, own = p(t, scd).max(), p(s, scd)[y]
    confidence = kl(torch.stack([top, 1 - top]), torch.stack([own, 1 - own]))
    lower = [c for c in range(len(t)) if t[c] < t[y]]
    masked = [z[lower] for z in (t, s)]
    correlation = kl(*(p(z, 4.0) for z in masked)) if lower else 0.0
    return 3 / 20 * (scd**2 * confidence + 8 * 16 * correlation) + ce(s, t, y)  # the third epoch of twenty


def tfkd(s: Tensor, t: Tensor, y: int) -> Tensor:
    u = torch.full((C,), 0.01 / (C - 1), dtype=torch.float64)
    u[y] = 0.99
    soft = u ** (1 / 20)
    return 0.1 * kl(soft / soft.sum(), p(s, 20.0)) + 0.9 * ce(s, t, y)


def smooth(s: Tensor, t: Tensor, y: int) -> Tensor:
    return 0.9 * ce(s, t, y) - 0.1 * p(s).log().mean()


def hinton(s: Tensor, t: Tensor, y: int) -> Tensor:
    s_, t_ = ((z - z.mean()) / (1e-7 + (((z - z.mean()) ** 2).sum() / (C - 1)).sqrt()) for z in (s, t))
    return 9 * 4 * kl(p(t_, 2.0), p(s_, 2.0)) + 0.1 * ce(s, t, y)


def ctkd(s: Tensor, t: Tensor, y: int, temperature: float = 1 + 20 / (1 + math.exp(-1))) -> Tensor:
    return 0.9 * temperature**2 * kl(p(t, temperature), p(s, temperature)) + 0.1 * ce(s, t, y)


def gkd(s: Tensor, t: Tensor, y: int, beta: float = 0.3) -> Tensor:
    a, b = p(s, 2.0), p(t, 2.0)
    if beta in {0, 1}:
        return 4 * (kl(a, b) if beta else kl(b, a)) + 0.5 * ce(s, t, y)
    m = beta * b + (1 - beta) * a
    return 4 * (beta * kl(b, m) + (1 - beta) * kl(a, m)) + 0.5 * ce(s, t, y)


def skew(s: Tensor, t: Tensor, y: int, reverse: bool = False) -> Tensor:
    a, b = p(s, 2.0), p(t, 2.0)
    return 4 * (kl(a, 0.9 * b + 0.1 * a) if reverse else kl(b, 0.1 * b + 0.9 * a))


def akl(s: Tensor, t: Tensor, y: int) -> Tensor:
    a, b, gap, head = p(s), p(t), [0.0, 0.0], 0.0
    for c in sorted(range(len(t)), key=lambda c: -t[c].item()):
        gap[head >= 0.5] += (a[c] - b[c]).abs().item()
        head += b[c].item()
    return (gap[0] * kl(b, a) + gap[1] * kl(a, b)) / sum(gap)


def tv(s: Tensor, t: Tensor, y: int) -> Tensor:
    return 2 * (p(t, 2.0) - p(s, 2.0)).abs().sum() / 2 + 0.5 * ce(s, t, y)


METHODS: dict[str, tuple[Callable[[], Objective], Loss]] = {
    "dkd": (DKD, dkd),
    "nkd": (lambda: NKD(gamma=3.5, temperature=3.0), nkd),
    "ttm": (TTM, ttm),
    "wttm": (lambda: TTM(0.2, 4.0, weighted=True), wttm),
    "rld": (RLD, rld),
    "rld at one temperature": (lambda: RLD(scd_temperature=4.0), partial(rld, scd=4.0)),
    "mse": (lambda: LogitMSE(0.5), lambda s, t, y: 0.5 * (s - t).square().sum() / C + ce(s, t, y)),
    "tfkd": (TfKD, tfkd),
    "ctkd": (lambda: CTKD().double(), ctkd),
    "smooth": (lambda: CrossEntropy(label_smoothing=0.1), smooth),
    "gkd": (lambda: GKD(0.3, 2.0, ce_weight=0.5), gkd),
    "gkd, forward": (lambda: GKD(0, 2.0, ce_weight=0.5), partial(gkd, beta=0)),
    "gkd, reverse": (lambda: GKD(1, 2.0, ce_weight=0.5), partial(gkd, beta=1)),
    "skew": (lambda: SkewKL(temperature=2.0), skew),
    "skew, reverse": (lambda: SkewKL(temperature=2.0, reverse=True), partial(skew, reverse=True)),
    "akl": (AdaptiveKL, akl),
    "tv": (lambda: TotalVariation(2.0, ce_weight=0.5), tv),
    "standardised": (lambda: Hinton(2.0, 9.0, 0.1, standardize=True), hinton),
}


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_formula_and_its_gradients(name: str) -> None:
    make, formula = METHODS[name]
    objective, student, teacher, y = make(), outputs(1), outputs(2), labels()
    rows = zip(student.logits, teacher.logits, y.tolist(), strict=True)
    theirs = sum((formula(s, t, label) for s, t, label in rows), start=torch.zeros(())) / B
    assert_equal(total(terms(objective, student, teacher, y, 2.5)), theirs, student.logits, atol=1e-11)


def test_dist_equals_its_formula() -> None:
    student, teacher, y = outputs(1), outputs(2), labels()
    p_s, p_t = (torch.stack([p(row, 4.0) for row in x.logits]) for x in (student, teacher))

    def r(a: Tensor, b: Tensor) -> Tensor:
        a, b = a - a.sum() / len(a), b - b.sum() / len(b)
        return (a * b).sum() / ((a**2).sum().sqrt() * (b**2).sum().sqrt() + 1e-8)

    inter = sum(1 - r(p_s[i], p_t[i]) for i in range(B)) / B
    intra = 1 - sum(r(p_s[:, c], p_t[:, c]) for c in range(C)) / C
    expected = 2 * 16 * (inter + intra) + F.cross_entropy(student.logits, y)
    assert_equal(total(terms(DIST(), student, teacher, y)), expected, student.logits)


def test_kd_is_the_sum_of_what_dkd_decouples() -> None:
    student, teacher, y = outputs(1), outputs(2), labels()
    terms = DKD(temperature=3.0, warmup=0).terms(student, teacher, y)
    whole = Hinton(3.0).terms(student, teacher, y)["kd"].values / 9
    target = (teacher.logits / 3).softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(whole, terms["tckd"].values + (1 - target) * terms["nckd"].values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("make", "weights"), [(DKD, {"tckd": 16, "nckd": 128}), (RLD, {"scd": 1, "mcd": 128})])
def test_methods_warm_up_by_whole_epochs(make: Callable[..., Objective], weights: dict[str, float]) -> None:
    objective, student, teacher, y = make(), outputs(1), outputs(2), labels()
    shares = {0.0: 1 / 20, 0.9: 1 / 20, 1.0: 2 / 20, 18.9: 19 / 20, 19.0: 1, 300.0: 1}
    for epoch, share in shares.items():
        found = objective.terms(student, teacher, y, StepContext(epoch=epoch))
        assert {name: found[name].weight for name in weights} == pytest.approx(
            {name: share * weight for name, weight in weights.items()}
        )
    assert make(warmup=0).terms(student, teacher, y).keys() == found.keys()


EVERY: dict[str, Callable[..., Objective]] = {
    "hinton": Hinton, "reverse": ReverseKL, "js": JensenShannon, "dkd": DKD, "nkd": NKD, "ttm": TTM, "dist": DIST,
    "rld": RLD, "mse": LogitMSE, "ctkd": CTKD, "wttm": lambda **options: TTM(0.2, 4.0, weighted=True, **options),
    "gkd": GKD, "gkd, forward": partial(GKD, 0), "gkd, reverse": partial(GKD, 1), "skew": SkewKL,
    "skew, reverse": partial(SkewKL, reverse=True), "akl": AdaptiveKL, "tv": TotalVariation,
}  # fmt: skip


@pytest.mark.parametrize(("epoch", "harder"), [(0.0, 0.0), (5.0, 0.5), (10.0, 1.0), (60.0, 1.0)])
def test_the_temperature_learns_to_make_the_task_harder(epoch: float, harder: float) -> None:
    objective, student, teacher, y = CTKD().double(), outputs(1), outputs(2), labels()
    (found,) = torch.autograd.grad(total(terms(objective, student, teacher, y, epoch)), [*objective.parameters()])
    theta = torch.ones(1, dtype=torch.float64, requires_grad=True)
    rows = zip(student.logits, teacher.logits, y.tolist(), strict=True)
    losses = [ctkd(s, t, label, 1 + 20 * theta.sigmoid()) for s, t, label in rows]
    (plain,) = torch.autograd.grad(sum(losses[1:], losses[0]) / B, theta)
    assert plain.abs() > 1e-3
    torch.testing.assert_close(found, -harder * plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("batch", ["extreme", "opposite", "constant", "zeros", "one row", "no row"])
def test_extremes_are_finite(name: str, standardize: bool, batch: str) -> None:
    rows = {"one row": 1, "no row": 0}.get(batch, B)
    scale = 1e4 if batch in {"extreme", "opposite"} else 1.0
    student, teacher = (outputs(seed, rows, scale=scale, dtype=torch.float32) for seed in (1, 2))
    with torch.no_grad():
        if batch == "opposite":
            teacher.logits.copy_(-student.logits)
        if batch == "constant":
            student.logits.fill_(3.0)
        if batch == "zeros":
            student.logits.zero_()
            teacher.logits.zero_()
    loss = total(terms(EVERY[name](standardize=standardize), student, teacher, labels(rows)))
    (grad,) = torch.autograd.grad(loss, student.logits)
    assert loss.isfinite() or not rows
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_standardised_logits_may_be_moved_and_scaled(name: str) -> None:
    student, teacher, y = outputs(1), outputs(2), labels()
    moved = Outputs(3 * teacher.logits + 7, {})
    first, second = (terms(EVERY[name](standardize=True), student, t, y) for t in (teacher, moved))
    for term in first:
        torch.testing.assert_close(first[term].values, second[term].values, rtol=1e-5, atol=1e-7)
    assert zscore(torch.full((2, 4), 5.0)).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("name", [name for name in EVERY if name != "mse"])  # whose logits may not be moved
@pytest.mark.parametrize("standardize", [False, True])
def test_an_ensemble_is_the_mean_of_its_distributions(name: str, standardize: bool) -> None:
    student, y, members = outputs(1), labels(), [outputs(seed).logits.detach() for seed in (2, 3, 4)]
    one = Outputs(members[0], {"members": torch.stack([members[0]] * 3, 1)})
    alone, thrice = (terms(EVERY[name](standardize=standardize), student, t, y) for t in (Outputs(members[0], {}), one))
    for term in alone:
        torch.testing.assert_close(alone[term].values, thrice[term].values, rtol=0, atol=1e-10)
    mixed = temper(Outputs(members[0], {"members": torch.stack(members, 1)}), 4.0)
    expected = sum((z / 4).softmax(1) for z in members) / 3
    torch.testing.assert_close(mixed.softmax(1), expected, rtol=0, atol=1e-14)
    assert mixed.logsumexp(1).abs().max() < 1e-14


TOKENS = EVERY | {"ce": CrossEntropy}
del TOKENS["dist"]  # relates rows


@pytest.mark.parametrize("name", TOKENS)
def test_each_token_of_a_text_has_a_samples_value(name: str) -> None:
    student, teacher, y = outputs(1), outputs(2), labels()
    flat = terms(TOKENS[name](), student, teacher, y)
    for rows in (2, 0):
        texts = [Outputs(x.logits.view(2, 3, C)[:rows], {}) for x in (student, teacher)]
        for term, (values, weight, *_) in terms(TOKENS[name](), *texts, y.view(2, 3)[:rows]).items():
            torch.testing.assert_close(values, flat[term].values.view(2, 3)[:rows], rtol=0, atol=1e-12)
            assert weight == flat[term].weight


@pytest.mark.parametrize("name", EVERY)
def test_autocast_rounds_no_loss(name: str) -> None:
    student, teacher = (Outputs(outputs(seed).logits.detach().bfloat16(), {}) for seed in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = total(terms(EVERY[name](), student, teacher, labels()))
    exact = (Outputs(x.logits.double(), {}) for x in (student, teacher))
    torch.testing.assert_close(found.double(), total(terms(EVERY[name](), *exact, labels())), rtol=2e-5, atol=0)


@pytest.mark.parametrize("method", [DKD, NKD, RLD])
def test_two_classes_have_no_others(method: Callable[[], Objective]) -> None:
    nets = [net(make, num_classes=2) for make in (DeepNN, DeepNN)]
    with pytest.raises(BadInput, match=r"^variants\.a\.classes 2: expected at least 3: \w+ compares classes other"):
        Distillation(nets[0], {"a": (nets[1], method())}, input_shape=SHAPE, num_classes=2)


def two_classes(objective: Objective) -> Distillation:
    teacher, student = (net(DeepNN, num_classes=2) for _ in range(2))
    return Distillation(teacher, {"a": (student, objective)}, input_shape=SHAPE, num_classes=2)


@pytest.mark.parametrize(
    "make",
    [CTKD, DIST, Hinton, JensenShannon, LogitMSE, ReverseKL, TTM, partial(DIST, inter_weight=0.0)],
    ids=lambda make: getattr(make, "__name__", "intra"),
)
def test_two_standardised_logits_have_no_gradient_and_are_refused(make: Callable[..., LogitObjective]) -> None:
    line = r"^variants\.a\.standardize True: expected at least 3 classes, not 2: standardised logits of two are"
    with pytest.raises(BadInput, match=line):
        two_classes(make(standardize=True))
    student, teacher = (outputs(seed, classes=2) for seed in (1, 2))
    found = {k: t for k, t in terms(make(standardize=True), student, teacher, labels() % 2).items() if not t.is_ce}
    assert torch.autograd.grad(total(found), student.logits)[0].abs().max() < 1e-5


def test_two_probabilities_always_correlate_and_are_refused() -> None:
    line = r"^variants\.a\.inter_weight 2\.0: expected 0, as there are 2 classes: two probabilities always correlate"
    with pytest.raises(BadInput, match=line):
        two_classes(DIST())
    with pytest.raises(BadInput, match=r"^variants\.a\.objectives\.1\.inter_weight 2\.0: expected 0, as "):
        two_classes(Sum([Hinton(), DIST()]))
    two_classes(DIST(inter_weight=0.0))
    two_classes(DeiTToken(student_layer="classifier", class_layer="classifier", standardize=True))
    student, teacher = (outputs(seed, classes=2) for seed in (1, 2))
    inter = terms(DIST(), student, teacher, labels() % 2)["inter"].values.mean()
    assert torch.autograd.grad(inter, student.logits)[0].abs().max() < 1e-6


def test_a_distillation_token_can_be_standardised() -> None:
    student, teacher = outputs(1), outputs(2)
    heads = {"head": student.logits, "head_dist": student.logits}
    values = DeiTToken("soft", standardize=True).terms(student._replace(features=heads), teacher, labels())["token"]
    expected = Hinton(3.0, standardize=True).terms(student, teacher, labels())["kd"]
    assert torch.equal(values.values, expected.values)
