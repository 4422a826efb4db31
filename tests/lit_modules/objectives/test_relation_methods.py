"""Methods that relate samples equal their papers' formulas, over the global batch of any number of processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.errors import BadInput
from lab.strategies import LocalSGD
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN, Outputs
from lit_modules.objectives import CC, DIST, PKT, RKD, SP, Cosine, Hint, Hinton, Objective, Sum
from lit_modules.objectives.embeddings import EmbeddingObjective
from strategies import PipelineStrategy
from tests.formulas import assert_equal, total
from tests.grids import mostly_slow
from tests.training import SHAPE, Outcome, assert_agree, assert_same, digits, fit, net, on, outcome, trainer, weights

B, C = 6, 4
METHODS: dict[str, Callable[[], EmbeddingObjective]] = {"rkd": RKD, "sp": SP, "pkt": PKT}


def outputs(seed: int, width: int, rows: int = B, mean: float = 0.0, dtype: torch.dtype = torch.float64) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    e = mean + torch.randn(rows, width, generator=g, dtype=torch.float64)
    logits = torch.randn(rows, C, generator=g, dtype=torch.float64)
    return Outputs(logits.to(dtype).requires_grad_(), {"pooled": e.to(dtype).requires_grad_(), "default": e.to(dtype)})


def at(name: str, student: Outputs, teacher: Outputs) -> Tensor:
    """The loss of the batch without its cross-entropy."""
    objective = METHODS[name]()
    for found in (student, teacher):
        found.features["default"] = found.features["pooled"]
    terms = objective(student, teacher, torch.zeros(len(student.logits), dtype=torch.int64))
    return total({name: term for name, term in terms.items() if name != "ce"})


def huber(x: Tensor) -> Tensor:
    return 0.5 * x**2 if x.abs() < 1 else x.abs() - 0.5


def rkd(s: Tensor, t: Tensor) -> Tensor:
    """Park et al., equations 3 to 5; means over all pairs and triples."""
    n = len(s)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    mu = [sum((e[i] - e[j]).norm() for i, j in pairs) / len(pairs) for e in (s, t)]
    distance = sum(huber((s[i] - s[j]).norm() / mu[0] - (t[i] - t[j]).norm() / mu[1]) for i, j in pairs) / n**2
    angle = torch.zeros((), dtype=torch.float64)
    for i, j in pairs:
        for k in range(n):
            if k != i:
                (a, b), (c, d) = ([(e[x] - e[i]) / (e[x] - e[i]).norm() for x in (j, k)] for e in (s, t))
                angle = angle + huber(a @ b - c @ d)
    return 25 * distance + 50 * angle / n**3


def sp(s: Tensor, t: Tensor) -> Tensor:
    """Tung and Mori, equations 2 to 4."""
    n, total = len(s), torch.zeros((), dtype=torch.float64)
    for i in range(n):
        g_s, g_t = (torch.stack([e[i] @ e[j] for j in range(n)]) for e in (s, t))
        total = total + (g_s / g_s.norm() - g_t / g_t.norm()).square().sum()
    return 3000 * total / n**2


def pkt(s: Tensor, t: Tensor) -> Tensor:
    """Passalis and Tefas, equations 2 to 6 with cosine similarities; i = j counts, and 1e-7, as in their code."""
    n, total = len(s), torch.zeros((), dtype=torch.float64)
    for i in range(n):
        a_s, a_t = ([row / (row.norm() + 1e-7) for row in e] for e in (s, t))
        k_s, k_t = (torch.stack([(a[i] @ a[j] + 1) / 2 for j in range(n)]) for a in (a_s, a_t))
        p_s, p_t = k_s / k_s.sum(), k_t / k_t.sum()
        total = total + (p_t * ((p_t + 1e-7) / (p_s + 1e-7)).log()).sum()
    return 30000 * total / n**2


@pytest.mark.parametrize(("name", "formula", "tolerance"), [("rkd", rkd, 1e-12), ("sp", sp, 1e-9), ("pkt", pkt, 1e-8)])
def test_equals_the_formula_and_its_gradients(name: str, formula: Callable, tolerance: float) -> None:
    student, teacher = outputs(1, 5), outputs(2, 7)
    e = student.features["pooled"]
    ours = at(name, student, teacher)
    theirs = formula(e, teacher.features["pooled"].detach())
    assert_equal(ours, theirs, e, atol=tolerance)


@pytest.mark.parametrize("equal", [2, 8])
def test_distances_of_equal_rows_count_in_their_mean(equal: int) -> None:
    """Park et al., equation 4: mu divides by all pairs of different samples, B (B - 1), whatever their distance."""
    student, teacher = outputs(1, 5, rows=16), outputs(2, 7, rows=16)
    s, t = student.features["pooled"], teacher.features["pooled"].detach()
    with torch.no_grad():
        s[:equal] = s[0]
    labels = torch.zeros(16, dtype=torch.int64)
    ours = RKD(distance_weight=1.0, angle_weight=0.0)(student, teacher, labels)["distance"].values.mean()
    d_s, d_t = (torch.stack([torch.stack([(a - b).norm() for b in e]) for a in e]) for e in (s, t))
    d_s, d_t = (d / (d.sum() / (16 * 15)) for d in (d_s, d_t))
    theirs = torch.stack([huber(x) for x in (d_s - d_t).flatten()]).mean()
    assert_equal(ours, theirs, s)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("batch", ["duplicates", "constant", "zeros", "one row", "no row"])
def test_degenerate_batches_are_finite(name: str, batch: str) -> None:
    rows = {"one row": 1, "no row": 0}.get(batch, B)
    student, teacher = outputs(1, 5, rows, dtype=torch.float32), outputs(2, 7, rows, dtype=torch.float32)
    with torch.no_grad():
        e = student.features["pooled"]
        if batch == "duplicates":
            e[1] = e[0]
            teacher.features["pooled"][1] = teacher.features["pooled"][0]
        e *= 0 if batch == "zeros" else 1
        e[:] = e[:1] if batch == "constant" else e
    loss = at(name, student, teacher)
    (grad,) = torch.autograd.grad(loss, e)
    assert loss.isfinite() or not rows
    assert grad.isfinite().all()
    assert not grad.numel() or grad.abs().max() < 1e4


@pytest.mark.parametrize("name", METHODS)
def test_float32_far_from_zero_keeps_its_digits(name: str) -> None:
    exact = [outputs(seed, width, mean=1000.0) for seed, width in ((1, 5), (2, 7))]
    rounded = [outputs(seed, width, mean=1000.0, dtype=torch.float32) for seed, width in ((1, 5), (2, 7))]
    with torch.no_grad():  # the same numbers
        for a, b in zip(exact, rounded, strict=True):
            a.features["pooled"].copy_(b.features["pooled"])
    found, expected = at(name, *rounded), at(name, *exact)
    scale = {"rkd": 1e-4, "sp": 1e-3, "pkt": 1e-3}[name]
    torch.testing.assert_close(found.double(), expected, rtol=scale, atol=scale)


@pytest.mark.parametrize("objective", [PKT(), CC(), RKD(), Cosine(student_layer="pooled", teacher_layer="pooled")])
def test_cosines_of_one_value_have_no_gradient_and_are_refused(objective: Objective) -> None:
    student, teacher = outputs(1, 1), outputs(2, 7)
    with pytest.raises(BadInput, match=r"expected .* more .*value|expected 0: pooled of the student has one value"):
        objective.build(student, teacher)
    objective.build(outputs(1, 2), teacher)
    if isinstance(objective, PKT):
        return  # what its 1e-7 leaves of the gradient is large, as P_s is 0 or constant
    terms = objective(student, teacher, torch.zeros(B, dtype=torch.int64))
    name = "angle" if isinstance(objective, RKD) else next(iter(terms))
    (gradient,) = torch.autograd.grad(terms[name].values.mean(), student.features["pooled"])
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize(("objective", "fewest"), [(RKD(), 3), (DIST(1.0), 3), (PKT(), 2), (SP(), 2), (CC(), 2)])
def test_relations_of_too_few_rows_have_no_gradient_and_are_refused(objective: Objective, fewest: int) -> None:
    for rows in (fewest - 1, fewest):
        student, teacher = outputs(1, 5, rows), outputs(2, 7, rows)
        for found in (student, teacher):
            found.features["default"] = found.features["pooled"]
        terms = objective(student, teacher, torch.zeros(rows, dtype=torch.int64))
        related = [terms["intra"]] if "intra" in terms else [term for term in terms.values() if not term.is_ce]
        inputs = [student.logits, student.features["pooled"]]
        loss = sum((term.values.mean() for term in related), start=torch.zeros(()))
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        slope = max(g.abs().max() for g in gradients if g is not None)
        assert (slope > (1e-2 if isinstance(objective, DIST) else 1e-6)) == (rows == fewest)  # DIST: its 1e-8
    students = {"a": (net(LightNN), objective)}
    module = Distillation(net(LightNN), students, input_shape=SHAPE)
    module.check_batch(fewest)
    line = rf"^data\.batch_size {fewest - 1}: expected at least {fewest}: {type(objective).__name__} relates samples"
    with pytest.raises(BadInput, match=line):
        fit(module, digits(batch_size=fewest - 1, train_size=12), max_epochs=1)


RELATING: dict[str, Callable[[], Objective]] = {
    "rkd": RKD,
    "sp": SP,
    "pkt": PKT,
    "dist": DIST,
    "both": lambda: Sum([RKD(angle_weight=0), Hint()], [0.5, 1.0]),
}


def module(*names: str, seed: int = 0) -> Distillation:
    students = {name: (net(), RELATING[name]()) for name in names or RELATING}
    others = {} if names else {"kd": (net(), Hinton())}
    return Distillation(net(DeepNN, seed=1), students | others, input_shape=SHAPE, seed=seed)


def trained(folder: Path, place: str, **options: Any) -> Outcome:
    """The last batch has one row: ranks are empty."""
    tags = [f"{name}/train/loss" for name in RELATING]
    return outcome(module(), digits(train_size=75), folder, tags, **on(place) | options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(tmp_path_factory.mktemp("alone"), "auto 1", precision="64-true")


# Others by any method: tests/harness/test_zoo.py
PLACES = ["ddp 3", "ddp 8", "hsdp 4", "ddp 1 exact 4"]


@pytest.mark.parametrize("place", mostly_slow(PLACES, "ddp 3", "ddp 1 exact 4"))
def test_any_number_of_processes_computes_one_loss(place: str, alone: Outcome, tmp_path: Path) -> None:
    assert_agree(alone, trained(tmp_path, place, precision="64-true"))


@pytest.mark.slow
def test_micro_batches_relate_their_own_rows_on_any_number_of_processes(tmp_path: Path) -> None:
    options = {"precision": "64-true", "accumulate_grad_batches": 2}
    assert_agree(trained(tmp_path, "auto 1", **options), trained(tmp_path, "ddp 2", **options))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(tmp_path_factory.mktemp("exact"), "ddp 1 exact 4")


EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp 3 exact 4", {}),
    "two pipelines": ("pipeline 4 exact 4", {"data_parallel_size": 2}),
    "interleaved": ("pipeline 2 exact 4", {"schedule": "Interleaved1F1B", "stages_per_rank": 2}),
}


@pytest.mark.parametrize("case", mostly_slow(EXACT, "ddp"))
def test_exact_is_bitwise(case: str, exact: Outcome, tmp_path: Path) -> None:
    place, options = EXACT[case]
    assert_agree(exact, trained(tmp_path, place, **on(place, **options)), 0.0)


def test_a_sum_alone_is_as_in_company() -> None:
    both = fit(module(), digits(train_size=75))  # others by themselves: tests/harness/test_zoo.py
    own = {key: x for key, x in weights(both).items() if key.startswith("students.both.")}
    assert_same(weights(fit(module("both"), digits(train_size=75))), own)


@pytest.mark.parametrize("strategy", [LocalSGD, PipelineStrategy])
def test_strategies_without_a_global_batch_refuse(strategy: Any) -> None:
    # A pipeline relates micro-batches, and not under --exact.
    with pytest.raises(ValueError, match=r"^strategy \w+: expected objectives that don't relate rows"):
        trainer(2, strategy=strategy(timeout=60)).fit(module("rkd"), digits())
