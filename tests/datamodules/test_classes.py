"""Weights of classes and label noise: their formulas, on any number of processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.batch import HIDDEN, Batch
from apprentice.keyed import Dropout
from datamodules import Digits
from experiments import kd
from harness.runs.quiet import quiet
from lit_modules.objectives import RKD, CrossEntropy, Hinton, Objective
from tests.callbacks import SaveAndStop
from tests.commands import bad_input, refuse, results
from tests.grids import mostly_slow
from tests.strategies.test_strategies import STEPS
from tests.training import assert_agree, assert_same, classifier, digits, distil, fit, on, outcome, trainer, weights

WEIGHTS = [float(1 + number % 4) for number in range(10)]
CASES: dict[str, dict[str, Any]] = {
    "weights": {"class_weights": WEIGHTS},
    "all": {"class_weights": "balanced", "augment": True, "label_noise": 0.2},
    "hidden": {"class_weights": WEIGHTS, "labelled": 40},
    "mixed": {"class_weights": WEIGHTS, "mixup": 0.4},
}


@pytest.mark.parametrize("place", mostly_slow(["ddp 3", "pipeline 2"], "ddp 3"))
@pytest.mark.parametrize("case", mostly_slow(CASES, "all"))
def test_any_number_of_processes_learns_the_same(case: str, place: str, tmp_path: Path) -> None:
    relates_rows = "pipeline" not in place

    def run(place: str) -> Any:
        options = CASES[case]
        students: dict[str, Objective] = {"ce": CrossEntropy(label_smoothing=0.1), "kd": Hinton()}
        students |= {"rkd": RKD()} if relates_rows else {}
        module = distil(students, labelled="labelled" not in options)
        return outcome(module, digits(**options), tmp_path, ["kd/train/loss"], **on(place), **STEPS)

    assert_agree(run("auto 1"), run(place))


@pytest.mark.parametrize("case", ["all", pytest.param("hidden", marks=pytest.mark.slow)])
def test_exact_bits_are_those_of_one_process(case: str, tmp_path: Path) -> None:
    def run(place: str) -> dict[str, Tensor]:
        module = distil({"kd": Hinton(), "rkd": RKD()}, labelled="labelled" not in CASES[case])
        return weights(fit(module, digits(**CASES[case]), **on(place), max_epochs=1))

    assert_same(run("ddp 2 exact 3"), run("ddp 1 exact 3"))


def test_a_run_resumed_in_mid_epoch_ends_as_if_undisturbed(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"

    def ended_with(**options: Any) -> dict[str, Tensor]:
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        module = distil({"kd": Hinton()})
        with quiet():
            trainer(**STEPS | {"max_steps": 8, "precision": "32-true"} | options).fit(
                module, digits(**CASES["all"]), **resumed
            )
        return weights(module)

    right = ended_with()
    ended_with(callbacks=[SaveAndStop(path, 4)])
    assert_same(ended_with(), right)


def first_batch(**options: Any) -> Batch:
    data = digits(**options)
    data.trainer = None
    return data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)


def without_dropout(module: Any) -> Any:
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    return module.double()


@pytest.mark.parametrize("labelled", [None, 40])
def test_weighted_losses_are_torchs(labelled: int | None) -> None:
    """The teacher's and the students', in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        batch = first_batch(class_weights=WEIGHTS, labelled=labelled)
        known, w = batch.labels != HIDDEN, torch.tensor(WEIGHTS)
        assert known.all() == (labelled is None)
        module, labels = without_dropout(classifier()), batch.labels[known]
        expected = F.cross_entropy(module(batch.inputs)[known], labels, weight=w)
        torch.testing.assert_close(module.shard_step(batch)[0], expected, rtol=1e-12, atol=0)
        students = without_dropout(distil({"ce": CrossEntropy(), "kd": Hinton()}, labelled=labelled is None))
        expected = F.cross_entropy(students.net_of("ce")(batch.inputs)[known], labels, weight=w)
        parts = students.shard_step(batch)[1]
        for name in ("ce/loss", "ce/ce", "kd/ce"):  # both begin with the same weights
            torch.testing.assert_close(parts[name].mean(), expected, rtol=1e-12, atol=0)
        plain = students.shard_step(batch._replace(class_weights=None))[1]
        assert plain["kd/kd"].equal(parts["kd/kd"])  # the teacher's part has no weights
    finally:
        torch.set_default_dtype(torch.float32)


def test_balanced_weights_are_scikit_learns() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    data = digits(class_weights="balanced")
    labels = data.split("train").labels
    expected = compute_class_weight("balanced", classes=np.arange(10), y=labels.numpy())
    assert data.weights_of_classes(labels).tolist() == pytest.approx(expected.tolist(), rel=1e-15)


def test_label_noise_is_in_training_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"train_size": 200, "validation_size": 100}
    clean, noisy, again = (digits(label_noise=noise, **options) for noise in (0.0, 0.3, 0.3))
    for part in ("validation", "test"):
        for one, other in zip(clean.split(part), noisy.split(part), strict=True):
            assert one.equal(other)
    truth, labels = clean.split("train").labels, noisy.split("train").labels
    assert int((truth != labels).sum()) == 60
    assert labels.equal(again.split("train").labels)
    assert not labels.equal(digits(label_noise=0.3, seed=1, **options).split("train").labels)
    assert 0 <= int(labels.min()) <= int(labels.max()) < 10
    assert len((labels - truth).remainder(10).unique()) == 10  # symmetric: every other class
    assert (
        "Digits: label noise: 60 of 200 training labels are another class, drawn by seed 0\n" in capsys.readouterr().err
    )


@pytest.mark.parametrize("by", ["seed", "split"])
def test_weights_and_noise_of_the_labels_that_students_know_are_said(
    by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sklearn.utils.class_weight import compute_class_weight

    options: dict[str, Any] = {"train_size": 200, "subset": "proportional", "labelled": 30, "labelled_by": by}
    data, truth = digits(class_weights="balanced", label_noise=0.1, **options), digits(**options).split("train").labels
    labels, said = data.split("train").labels, list[str]()
    for seed in (4, 6):
        data.order_seed = seed
        known = data.train_dataloader().labelled
        data.train_dataloader()
        assert known is not None
        of = "of the 30 labels that students know" + f" with seed {seed}" * (by == "seed")
        weights = compute_class_weight("balanced", classes=np.arange(10), y=labels[known].numpy())
        said.append(f"Digits: weights {of}: {', '.join(f'{n} {weight:.3g}' for n, weight in enumerate(weights))}")
        said.append(f"Digits: label noise: {int((truth != labels)[known].sum())} {of} are another class")
    data.hides_labels = False
    data.train_dataloader()
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "students" in line] == (said if by == "seed" else said[:2])
    weights = compute_class_weight("balanced", classes=np.arange(10), y=labels.numpy())
    assert f"Digits: weights of classes: {', '.join(f'{n} {weight:.3g}' for n, weight in enumerate(weights))}" in told
    assert "Digits: label noise: 20 of 200 training labels are another class, drawn by seed 0" in told


def test_what_can_not_be_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"class_weights": [1.0, 2.0]}, "data.class_weights [1.0, 2.0]: expected balanced, or a list"),
        ({"class_weights": [-1.0] * 10}, "data.class_weights [-1.0, "),
        ({"class_weights": [0.0] * 10}, "data.class_weights [0.0, "),
        ({"label_noise": 1.0}, "data.label_noise 1.0: expected a fraction"),
    ]
    for options, line in cases:
        assert bad_input(lambda options=options: Digits(**options).setup()).startswith(line)


def test_a_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "Digits", "--data.label_noise", "0.25", "--data.class_weights", "balanced"]
    flags += ["--data.train_size", "120", "--teacher", "LightNN", "--only", "ce", "--seeds", "1"]
    kd.main([*flags, "--trainer.max_epochs", "1", "--out", str(tmp_path / "run")])
    shown, told = capsys.readouterr()
    noise = "label noise: 25 % of the training labels are another class, on purpose; no others."
    assert noise in " ".join(shown.split())
    assert "Digits: weights of classes: 0 " in told
    assert results(tmp_path / "run")["config"]["data"]["init_args"]["label_noise"] == 0.25
    assert refuse(kd.main, ["--data.class_weights", "equal"], tmp_path, capsys).startswith("--data.class_weights equal")
