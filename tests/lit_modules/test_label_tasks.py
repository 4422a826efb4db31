"""Labels that are no classes: their losses, scores and methods are their formulas, on any number of ranks."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.splits import Split, as_floats
from experiments import kd
from harness.studies import zoo
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import CC, MLD, PKT, RKD, SP, BoundedRegression, CrossEntropy, Hint, LogitMSE, Objective
from lit_modules.objectives.context import StepContext
from lit_modules.tasks import task_of
from lit_modules.tasks.multilabel import MultiLabel
from lit_modules.tasks.regression import Regression
from tests.commands import results
from tests.training import SHAPE, assert_same, fit, net, on, weights

NAN = torch.nan


class Labelled(InMemoryData):
    """Digits whose labels are whether they are even, above 4 and divisible by 3; some are unknown."""

    input_shape = SHAPE
    class_names: tuple[str, ...] = ("even", "large", "third")
    task = "multilabel"

    def read(self) -> tuple[Split, ...]:
        digits = load_digits()
        images, numbers = torch.from_numpy(digits.images[:160]).byte()[:, None], torch.from_numpy(digits.target[:160])
        return (Split(images, self.label(images, numbers)),)

    def label(self, images: Tensor, numbers: Tensor) -> Tensor:
        labels = torch.stack([numbers % 2 == 0, numbers > 4, numbers % 3 == 0], 1).long()
        labels[::7, 1] = -1
        return labels

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return inputs.to(dtype or torch.get_default_dtype()) / 16


class Measured(Labelled):
    """Digits with two numbers each: the ink, and the digit."""

    class_names = ("ink", "digit")
    task = "regression"

    def label(self, images: Tensor, numbers: Tensor) -> Tensor:
        labels = torch.stack([images.float().mean((1, 2, 3)), 100 * numbers.float()], 1)
        labels[3::9, 0] = NAN
        return labels


KINDS: dict[type[Labelled], dict[str, Objective]] = {
    Labelled: {"ce": CrossEntropy(), "mld": MLD(), "mse": LogitMSE(), "rkd": RKD(), "cc": CC()},
    Measured: {"ce": CrossEntropy(), "bounded": BoundedRegression(), "mse": LogitMSE(), "sp": SP(), "pkt": PKT(),
               "hint": Hint()},
}  # fmt: skip


def made(kind: type[Labelled], **options: Any) -> Labelled:
    data = kind(batch_size=37, validation_size=0.1, **options)
    data.setup()
    return data


def logits_and_labels(data: Labelled) -> tuple[Tensor, Tensor]:
    labels = data.split("test").labels.double()
    return torch.randn(labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), labels


def test_several_labels_have_the_losses_and_scores_of_their_formulas() -> None:
    data = made(Labelled)
    task, (z, y) = task_of(data), logits_and_labels(data)
    p, known = z.sigmoid(), ~y.isnan()
    losses = [-torch.where(y[i] == 1, p[i], 1 - p[i])[known[i]].log().mean() for i in range(len(y))]
    torch.testing.assert_close(task.loss(z, y), torch.stack(losses), rtol=1e-9, atol=0)
    scores = task.scores()
    for rows in torch.arange(len(y)).split(7):
        scores.index = rows
        scores.update(z[rows], y[rows])
    found = scores.compute()
    ap = [average_precision_score(y[known[:, c], c], z[known[:, c], c]) for c in range(3)]
    assert float(found["map"]) == pytest.approx(np.mean(ap), abs=1e-6)
    right = ((z > 0) == (y == 1)) & known
    assert float(found["label_acc"]) == pytest.approx(float(right.sum() / known.sum()))
    assert float(found["exact"]) == pytest.approx(float((right | ~known).all(1).double().mean()))
    assert float(found["loss"]) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-8)


def test_numbers_have_the_losses_and_scores_of_their_formulas() -> None:
    data = made(Measured)
    task, (z, y) = task_of(data), logits_and_labels(data)
    trained = data.split("train").labels.double().numpy()
    mean, std = np.nanmean(trained, 0), np.nanstd(trained, 0)
    known = ~y.isnan()
    standard = (y - torch.from_numpy(mean)) / torch.from_numpy(std)
    losses = [(z[i] - standard[i]).square()[known[i]].mean() for i in range(len(y))]
    torch.testing.assert_close(task.loss(z, y), torch.stack(losses), rtol=1e-9, atol=0)
    scores = task.scores()
    scores.index = torch.arange(len(y))
    scores.update(z, y)
    found = scores.compute()
    predicted = z * torch.from_numpy(std) + torch.from_numpy(mean)
    r2 = [r2_score(y[known[:, c], c], predicted[known[:, c], c]) for c in range(2)]
    assert float(found["r2"]) == pytest.approx(np.mean(r2), rel=1e-9)
    of_samples = [mean_absolute_error(y[i, known[i]], predicted[i, known[i]]) for i in range(len(y))]
    assert float(found["mae"]) == pytest.approx(np.mean(of_samples), rel=1e-8)


def test_mld_is_exact_where_probabilities_are_all_but_certain() -> None:
    t, s = torch.tensor([[17.0, -40.0, 2.0]]).double(), torch.tensor([[40.0, 3.0, -1.0]]).double().requires_grad_()
    value = MLD()(Outputs(s, {}), Outputs(t, {}), torch.zeros(1).long())["mld"].values
    terms = []
    for a, b in zip(t[0].tolist(), s[0].tolist(), strict=True):
        p, lp, lq = [1 / (1 + np.exp(-a)), -np.log1p(np.exp(-a)), -np.log1p(np.exp(-b))]
        n, ln, lm = [1 / (1 + np.exp(a)), -np.log1p(np.exp(a)), -np.log1p(np.exp(b))]
        terms.append(p * (lp - lq) + n * (ln - lm))
    assert float(value.detach()) == pytest.approx(np.mean(terms), rel=1e-9)
    (gradient,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(gradient, (s.sigmoid() - t.sigmoid()) / 3, rtol=1e-9, atol=1e-16)


def test_a_bound_counts_where_the_student_is_worse_than_the_teacher() -> None:
    task = Regression([0.0, 0.0], [1.0, 2.0])
    s, t = torch.tensor([[1.0, 0.0], [0.1, 0.0]]).double(), torch.tensor([[0.5, 0.0], [0.5, 0.0]]).double()
    y = torch.zeros(2, 2).double()
    terms = BoundedRegression().terms(Outputs(s, {}), Outputs(t, {}), y, StepContext(loss=task.loss_of_labels))
    assert terms["bounded"].values.tolist() == [0.5, 0.0]
    torch.testing.assert_close(terms["ce"].values, task.loss(s, y))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_three_train_alike(kind: type[Labelled]) -> None:
    def distilled(place: str) -> dict[str, Tensor]:
        data = made(kind)
        classes = data.num_classes
        students = {name: (net(num_classes=classes), objective) for name, objective in KINDS[kind].items()}
        module = Distillation(net(DeepNN, 1, num_classes=classes), students, SHAPE, classes, task=task_of(data))
        return weights(fit(module, cast("Any", data), **on(place), precision="64-true"))

    assert_same(distilled("ddp 1"), distilled("ddp 3"), atol=1e-9)


def test_a_run_says_what_its_nets_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", f"{__name__}.Labelled", "--seeds", "1", "--trainer.max_epochs", "1"]
    kd.main([*flags, "--only", "ce", "mld", "--metric", "exact", "--out", str(tmp_path / "run")])
    saved = results(tmp_path / "run")["students"]["mld"]
    assert {"test_map", "test_exact", "test_label_acc", "delta_vs_ce"} <= {*saved}
    refused = {
        "expected a method that compares labels; it learns from classes": ["--only", "kd"],
        "by which several labels a sample are judged": ["--only", "ce", "--metric", "top5"],
        "not allowed, as a sample has 3 labels, not one": ["--only", "ce", "--data.labelled", "10"],
    }
    for expected, more in refused.items():
        with pytest.raises(SystemExit) as end:
            kd.main([*flags, *more])
        assert end.value.code
        assert expected in capsys.readouterr().err.splitlines()[-1]  # after what the data say of themselves


@pytest.mark.parametrize("kind", KINDS)
def test_all_methods_that_fit_are_compared_and_tuned(kind: type[Labelled], tmp_path: Path) -> None:
    short = ["--seeds", "1", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2"]
    kd.main(["--data", f"{__name__}.{kind.__name__}", "--zoo", "true", "--tune", "2", *short, "--out", str(tmp_path)])
    saved = results(tmp_path)
    theirs = {Labelled: {"mld", "fitnet"}, Measured: {"boundedregression", "fitnet"}}[kind]
    assert {*saved["students"]} == {"ce", "hint", "logitmse", "rkd", "sp", "pkt", "cc"} | theirs
    for name, tuned in saved["tuning"].items():
        assert all(np.isfinite(setting["validation"]).all() for setting in tuned["settings"]), name


class Boxes(InMemoryData):
    task = "detection"


def test_a_task_of_someone_elses_brings_no_methods() -> None:
    assert zoo.task_of({"data": f"{__name__}.Boxes"}) is None


def test_labels_of_other_kinds_are_refused() -> None:
    for labels, task, expected in (
        (torch.tensor([[0, 2]]), "multilabel", "labels that are 0, 1, or NaN where unknown; one is 2"),
        (torch.tensor([[0.0, float("inf")]]), "regression", "finite"),
        (torch.zeros(3), "multilabel", "labels (n, 2)"),
    ):
        with pytest.raises(BadInput) as fault:
            as_floats(labels, task, 2, "X")
        assert expected in str(fault.value)
    assert as_floats(torch.tensor([[1, -1]]), "multilabel", 2, "X").isnan().tolist() == [[False, True]]
    with pytest.raises(BadInput, match="by which several labels"):
        MultiLabel(3, "f1")
