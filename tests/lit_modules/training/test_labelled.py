"""Students that see some labels only: a term of labels is a mean over the labelled rows of the global batch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.batch import HIDDEN, Batch
from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.distillation import Distillation
from lit_modules.nets import Outputs
from lit_modules.objectives import SP, CrossEntropy, Hinton, Objective, Sum
from lit_modules.objectives.base import Term
from lit_modules.training.training_log import logged_names
from tests.formulas import assert_equal
from tests.grids import mostly_slow
from tests.training import (
    SHAPE,
    LinesLogger,
    Outcome,
    assert_agree,
    assert_same,
    classifier,
    digits,
    distil,
    fit,
    on,
    outcome,
    weights,
)

FEW = {"train_size": 75, "batch_size": 8, "labelled": 10}  # 10 batches, the last of 3; some have no label
STUDENTS: dict[str, Any] = {"ce": CrossEntropy, "kd": Hinton, "both": lambda: Sum([SP(), Hinton()], [1e-2, 1.0])}


def module(labelled: bool = False, names: tuple[str, ...] = ("ce", "kd", "both")) -> Distillation:
    return distil({name: STUDENTS[name]() for name in names}, labelled=labelled)


def trained(folder: Path, place: str, made: Any = None, **options: Any) -> Outcome:
    """All figures that training logged, and weights."""
    made, data = made or module(), digits(**{**FEW, **options.pop("data", {})})
    what = ("loss", "acc", "ce", "soft", "1.ce", "0.sp")
    values = [f"{run}/{name}".lstrip("/") for run in made.runs for name in what]
    tags = sorted({tag for tags in logged_names(made.run_scores.names(), values).values() for tag in tags})
    return outcome(made, data, folder, tags, **on(place), **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(tmp_path_factory.mktemp("alone"), "auto 1", precision="64-true")


def without_dropout(made: Any) -> Any:
    for layer in made.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    return made


def test_some_batches_have_no_label() -> None:
    data = digits(**FEW)
    known = [int((batch.labels != HIDDEN).sum()) for batch in data.train_dataloader()]
    assert 0 in known
    assert sum(known) == 10


def test_the_loss_is_the_papers_formula() -> None:
    g = torch.Generator().manual_seed(0)
    rows, inputs = torch.arange(7), torch.randn(7, *SHAPE, generator=g, dtype=torch.float64)
    labels = torch.tensor([3, HIDDEN, HIDDEN, 0, 9, HIDDEN, 0])
    made = without_dropout(module(names=("ce", "kd"))).double()
    batch = Batch(inputs, labels, rows, rows, 7, 1, 0, 7 / 4)
    loss, parts = made.train().shard_step(batch)
    teacher = (made.teacher(inputs) / 2).softmax(1)
    ce, kd, accuracy = {}, torch.zeros((), dtype=torch.float64), {}
    for name in ("ce", "kd"):
        logits = made.students[name].net(inputs)
        found = [-logits[i].log_softmax(0)[labels[i]] for i in rows if labels[i] != HIDDEN]
        ce[name] = torch.stack(found).sum() / 4
        accuracy[name] = sum(float(logits[i].argmax() == labels[i]) for i in rows if labels[i] != HIDDEN) / 4
    for i in rows:
        kd += 4 * (teacher[i] * (teacher[i].log() - (logits[i] / 2).log_softmax(0))).sum() / 7
    expected = ce["ce"] + 0.25 * kd + 0.75 * ce["kd"]
    assert_equal(loss, expected, [p for p in made.students.parameters() if p.requires_grad])
    for name in ("ce", "kd"):
        assert float(parts[f"{name}/acc"].double().mean()) == pytest.approx(accuracy[name], abs=1e-6)
    pieces = [batch.part(0, 3), batch.part(3, 3), batch.part(3, 7)]
    parted = sum(made.shard_step(piece)[0] * len(piece.labels) / 7 for piece in pieces)
    torch.testing.assert_close(parted, expected, rtol=1e-12, atol=1e-12)


def test_a_batch_without_labels_moves_nothing_but_what_needs_none() -> None:
    rows, inputs = torch.arange(5), torch.rand(5, *SHAPE)
    made = module(names=("ce", "kd")).train()
    made.shard_step(Batch(inputs, torch.full((5,), HIDDEN), rows, rows, 5, 1, 0, 5.0))[0].backward()
    gradients = {name: [p.grad.abs().max() for p in made.students[name].parameters()] for name in ("ce", "kd")}
    assert max(gradients["ce"]) == 0
    assert min(gradients["kd"]) > 0


PLACES = ["ddp 3", "ddp_zero1 2", "fsdp 2", "ddp 2 exact 4"]


@pytest.mark.parametrize("place", mostly_slow(PLACES, "ddp 3"))
def test_any_number_of_processes_computes_one_loss(place: str, alone: Outcome, tmp_path: Path) -> None:
    assert_agree(alone, trained(tmp_path, place, precision="64-true"))


def test_shards_have_the_bits_of_one_process(tmp_path: Path) -> None:
    assert_agree(*(trained(tmp_path, f"ddp {devices} exact 4") for devices in (1, 3)), 0.0)


@pytest.mark.parametrize("exact", mostly_slow(["", " exact 4"], ""))
def test_micro_batches_are_one_batch(exact: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {} if exact else {"precision": "64-true"}
    places = f"ddp 1{exact}", f"pipeline 2{exact}"
    found = (trained(tmp_path, place, module(names=("ce", "kd")), **options) for place in places)
    assert_agree(*found, 0.0 if exact else 1e-9)


@pytest.mark.parametrize("place", mostly_slow(["ddp 1", "ddp 1 exact 4"], "ddp 1"))
def test_with_all_labels_nothing_is_hidden(place: str, tmp_path: Path) -> None:
    one = trained(tmp_path, place, module(labelled=True), data={"labelled": None})
    assert_agree(one, trained(tmp_path, place, data={"labelled": 75}), 0.0)


@pytest.mark.parametrize("make", [lambda: module(names=("ce",)), classifier], ids=["student", "classifier"])
def test_an_epochs_figures_are_means_over_labelled_samples(make: Callable[[], Any], tmp_path: Path) -> None:
    made, data = without_dropout(make()), digits(**FEW)
    start, prefix = weights(made), "ce/" * isinstance(made, Distillation)

    made.optimization.make_optimizer = partial(torch.optim.SGD, lr=0.0)
    logger = LinesLogger(tmp_path / "lines")
    fit(made, data, logger=logger, log_every_n_steps=1, max_epochs=1)
    assert_same(start, weights(made))
    images, labels = data.samples("train", data.train_dataloader().labelled.nonzero().flatten())
    logits = made.predict(images)[prefix.rstrip("/")].detach()
    accuracy, loss = (logits.argmax(1) == labels).double().mean(), F.cross_entropy(logits, labels)
    assert logger.values(f"{prefix}train/acc_epoch") == pytest.approx([float(accuracy)], abs=1e-6)
    assert logger.values(f"{prefix}train/loss_epoch") == pytest.approx([float(loss)], rel=1e-5)
    known = [batch for batch in data.train_dataloader() if (batch.labels != HIDDEN).any()]
    assert len(logger.values(f"{prefix}train/acc")) == len(known) < 10


def test_a_classifier_learns_from_its_labels_alone(tmp_path: Path) -> None:
    one, three = (trained(tmp_path, place, classifier(), precision="64-true") for place in ("auto 1", "ddp 3"))
    assert_agree(one, three)


def test_other_labels_change_nothing() -> None:
    data, other = digits(**FEW), digits(**FEW)
    known = data.train_dataloader().labelled
    split = other.split("train")
    other._splits["train"] = split._replace(labels=split.labels.where(known, (split.labels + 1) % 10))
    assert_same(weights(fit(module(), data)), weights(fit(module(), other)))


class Secret(Objective):
    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        return {"mine": Term(F.cross_entropy(student.logits, labels, reduction="none"), 1.0)}


def test_a_term_that_does_not_say_that_it_needs_labels_is_refused() -> None:
    distil({"x": Secret()})
    line = r"^variants\.x Secret: expected an objective whose term mine needs no label, as some are hidden"
    with pytest.raises(BadInput, match=line):
        distil({"x": Secret()}, labelled=False)


def test_a_distillation_that_expects_labels_refuses_hidden_ones() -> None:
    with pytest.raises(ValueError, match="expected labelled=False"):
        fit(module(labelled=True), digits(**FEW))


def test_local_steps_use_the_global_batchs_weight() -> None:
    assert_same(*(weights(fit(module(names=("ce", "kd")), digits(**FEW), **on("local_sgd 2"))) for _ in range(2)))
