"""CRD's memory is one of the whole training: on any number of processes, after a stop, and never exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from apprentice import keyed
from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.nets import Outputs
from lit_modules.objectives import CRD, Objective, Sum
from lit_modules.objectives.context import StepContext
from strategies import PipelineStrategy
from tests.callbacks import SaveAndStop
from tests.formulas import assert_equal
from tests.grids import mostly_slow
from tests.training import Outcome, assert_agree, assert_same, digits, distil, fit, net, on, outcome, trainer, weights

SAMPLES = 75  # in batches of 37, the last of which has one row: ranks are empty
MADE: dict[str, Callable[[], Objective]] = {"crd": CRD, "few": lambda: Sum([CRD(negatives=20)])}


def module(*names: str, samples: int | None = SAMPLES, **options: Any) -> Distillation:
    return distil({name: MADE[name]() for name in names or MADE}, samples=samples, **options)


def trained(folder: Path, place: str, **options: Any) -> Outcome:
    tags = [f"{name}/train/loss" for name in MADE]
    return outcome(module(), digits(train_size=SAMPLES), folder, tags, **on(place), **options)


def test_any_number_of_processes_keeps_one_memory(tmp_path: Path) -> None:  # others: tests/harness/test_zoo.py
    one, three = (trained(tmp_path, place, precision="64-true") for place in ("auto 1", "ddp 3"))
    assert_agree(one, three)


def test_exact_is_bitwise(tmp_path: Path) -> None:
    assert_agree(trained(tmp_path, "ddp 1 exact 4"), trained(tmp_path, "ddp 2 exact 4"), 0.0)


@pytest.mark.parametrize("place", mostly_slow(["auto 1", "ddp 2 exact 4", "fsdp 2"], "auto 1"))
def test_resumed_in_mid_epoch_it_ends_with_the_bits_of_an_undisturbed_one(place: str, tmp_path: Path) -> None:
    undisturbed = fit(module(), digits(train_size=SAMPLES), **on(place))
    path = tmp_path / "stopped.ckpt"
    fit(module(), digits(train_size=SAMPLES), **on(place), callbacks=[SaveAndStop(path, 4)])
    resumed, data = module(), digits(train_size=SAMPLES)
    with quiet():
        trainer(**on(place)).fit(resumed, data, ckpt_path=path, weights_only=True)
    assert_same(weights(undisturbed), weights(resumed))


def test_the_memory_is_neither_sent_each_step_nor_part_of_the_net() -> None:
    made = module("crd")
    kept = {key for key in made.state_dict() if "bank" in key or "normal" in key or "classes" in key}
    assert {f"students.crd.objective.{key}" for key in ("bank_s", "bank_t", "classes", "normalisers")} == kept
    assert {*made._ddp_params_and_buffers_to_ignore} == kept
    assert made.students["crd"].net.state_dict().keys() == net().state_dict().keys()


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (CRD, {"samples": None}, r"variants\.crd CRD: expected a data module whose batches name their samples"),
        (CRD, {"labelled": False}, r"variants\.crd CRD: expected labels of all training samples; some are hidden"),
        (lambda: Sum([CRD()]), {"samples": None}, r"variants\.crd\.objectives\.0 CRD: expected a data module"),
        (lambda: Sum([CRD()]), {"labelled": False}, r"variants\.crd Sum: expected labels of all"),
        (lambda: CRD(negatives=0), {}, r"negatives 0: expected a number above 0"),
        (lambda: CRD(temperature=0.01), {}, r"temperature 0.01: expected a number from 0.02"),
    ],
)
def test_refused(objective: Callable[[], Objective], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"^{message}"):
        distil({"crd": objective()}, **{"samples": 75} | options)


def test_a_pipeline_refuses_parts_on_the_teachers_side() -> None:
    with pytest.raises(ValueError, match=r"expected objectives that don't relate rows|without trained parts"):
        trainer(2, strategy=PipelineStrategy(timeout=60)).fit(module("crd"), digits(train_size=SAMPLES))


def reference(
    objective: CRD, e_s: torch.Tensor, e_t: torch.Tensor, index: list[int], labels: list[int], step: int
) -> list[Any]:
    """The losses of the rows, sample by sample, for banks and classes before the batch."""
    known = objective.classes.tolist()
    for i, y in zip(index, labels, strict=True):
        known[i] = y
    n, rows = len(known), []
    losses: list[Any] = [0.0] * len(index)
    for side, (e, bank) in enumerate([(e_s, objective.bank_t), (e_t, objective.bank_s)]):
        scores, chosen = [], []
        for row, (i, y) in enumerate(zip(index, labels, strict=True)):
            others = [j for j in range(n) if known[j] != y]
            if n > objective.negatives:
                ordered = sorted(others, key=lambda j: known[j])  # Python's sort is stable too
                key = keyed.fold_in(step)
                random = keyed.bits(key, torch.tensor([i]), objective.negatives)[0].tolist()
                others = [ordered[r * len(ordered) // 2**32] for r in random]
            g = e[row] / e[row].square().sum().sqrt()
            chosen.append(others)
            scores.append([torch.exp((g * bank[j]).sum() / objective.temperature) for j in [i, *others]])
        z = float(objective.normalisers[side])
        if z == 0:
            rows = [x.item() for of in scores for x in of]
            z = n * sum(rows) / len(rows)
        for row, (own, *others) in enumerate(scores):
            c = len(others) / n
            losses[row] = losses[row] - torch.log(own / z / (own / z + c + 1e-7))
            losses[row] = losses[row] - sum(torch.log(c / (x / z + c + 1e-7)) for x in others)
    return losses


def built(negatives: int) -> CRD:
    objective = CRD(negatives=negatives, student_layer="a", teacher_layer="b")
    example = Outputs(torch.zeros(3, 4), {"a": torch.zeros(3, 5), "b": torch.zeros(3, 6)})
    keyed.with_seed(2, lambda: objective.build(example, example, StepContext(samples=9)))
    return objective.double()


def test_a_sample_that_comes_several_times_moves_its_rows_once() -> None:
    objective, g = built(100), torch.Generator().manual_seed(0)
    e_s, e_t = (torch.randn(3, 128, generator=g, dtype=torch.float64) for _ in range(2))
    before = objective.bank_s.clone(), objective.bank_t.clone()
    outputs = (Outputs(torch.zeros(3, 4), {layer: e}) for layer, e in (("a", e_s), ("b", e_t)))
    objective.after_batch(*outputs, torch.tensor([1, 0, 1]), StepContext(index=torch.tensor([4, 0, 4])))
    for old, bank, e in zip(before, (objective.bank_s, objective.bank_t), (e_s, e_t), strict=True):
        expected = old.clone()
        expected[[4, 0]] = normalize(0.5 * old[[4, 0]] + 0.5 * normalize(e[:2], dim=1), dim=1)
        torch.testing.assert_close(bank, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("negatives", [100, 6])
def test_it_is_the_papers_formula_and_the_banks_follow(negatives: int) -> None:
    objective, g = built(negatives), torch.Generator().manual_seed(0)
    for batch, (index, labels) in enumerate([([4, 0, 7], [1, 0, 1]), ([4, 2, 5], [1, 3, 0])]):
        context = StepContext(step=batch, index=torch.tensor(index))
        e_s, e_t = (torch.randn(3, 128, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
        student, teacher = Outputs(torch.zeros(3, 4), {"a": e_s}), Outputs(torch.zeros(3, 4), {"b": e_t})
        term = objective(student, teacher, torch.tensor(labels), context)["crd"]
        expected = torch.stack(reference(objective, e_s, e_t, index, labels, batch))
        assert_equal(term.values, expected, (e_s, e_t), rtol=1e-10, atol=1e-14, loss={"rtol": 1e-12, "atol": 0})
        before = objective.bank_s.clone()
        with torch.no_grad():
            objective.after_batch(student, teacher, torch.tensor(labels), context)
        for row, i in enumerate(index):
            own = e_s[row].detach() / e_s[row].detach().norm()
            moved = before[i] + own
            torch.testing.assert_close(objective.bank_s[i], moved / moved.norm(), rtol=1e-12, atol=1e-14)
        assert torch.equal(objective.classes[index], torch.tensor(labels))
        rest = [i for i in range(9) if i not in index]
        assert torch.equal(objective.bank_s[rest], before[rest])
    assert objective.normalisers.all()


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_few_rows_and_any_size_are_finite(rows: int, scale: float) -> None:
    objective = built(100).float()
    context = StepContext(index=torch.arange(rows))
    e_s, e_t = (torch.full((rows, 128), scale).requires_grad_() for _ in range(2))
    outputs = Outputs(torch.zeros(rows, 4), {"a": e_s, "b": e_t})
    values = objective(outputs, outputs, torch.ones(rows, dtype=torch.int64), context)["crd"].values
    assert values.shape == (rows,)
    assert all(x.isfinite().all() for x in (values, *torch.autograd.grad(values.sum(), (e_s, e_t))))


def test_one_class_alone_has_nothing_to_contrast() -> None:
    objective = built(100)
    objective.classes.fill_(1)
    context = StepContext(index=torch.arange(2))
    e = torch.randn(2, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    outputs = Outputs(torch.zeros(2, 4), {"a": e, "b": e})
    values = objective(outputs, outputs, torch.ones(2, dtype=torch.int64), context)["crd"].values
    assert values.isfinite().all()
    assert torch.autograd.grad(values.sum(), e)[0].isfinite().all()
