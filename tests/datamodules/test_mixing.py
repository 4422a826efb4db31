"""Mixup and CutMix: pixels and losses by their formulas, the same on any number of devices."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from apprentice.batch import Batch, Mixed, Partners
from datamodules import Digits
from datamodules.mixing import Mixing
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import SP, CrossEntropy, Hinton
from strategies import DDP, PipelineStrategy
from tests.training import SHAPE, assert_same, classifier, digits, distil, fit, net, trainer, weights

MIXED: dict[str, Any] = {"augment": True, "mixup": 0.8, "cutmix": 1.0}


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self.batches.append(batch)


def batches(**options: Any) -> tuple[list[Batch], list[Batch]]:
    def seen(data: Digits) -> list[Batch]:
        seen = Seen()
        fit(classifier(), data, precision="64-true", max_epochs=3, callbacks=[seen])
        return seen.batches

    mixing = {name: options.pop(name) for name in ("mixup", "cutmix") if name in options}
    return seen(digits(**options, **mixing)), seen(digits(**options))


def kinds(found: list[Batch], plain: list[Batch]) -> dict[str, int]:
    """Counts of batches that are the one or the other, each by its formula."""
    count = {"mixup": 0, "cutmix": 0}
    for batch, before in zip(found, plain, strict=True):
        assert isinstance(batch.mixed, Mixed)
        second, share = before.inputs.roll(1, 0), float(batch.mixed.share[0])
        assert torch.equal(batch.mixed.labels, before.labels.roll(1))
        assert torch.equal(batch.mixed.share, torch.full_like(batch.mixed.share, share))
        assert torch.equal(batch.labels, before.labels)
        if torch.allclose(batch.inputs, share * before.inputs + (1 - share) * second, rtol=0, atol=1e-12):
            count["mixup"] += 1
            continue
        rows, columns = pasted(batch.inputs, before.inputs, second)
        assert 1 - len(rows) * len(columns) / before.inputs[0].numel() >= share - 1e-12  # edges of digits are all black
        count["cutmix"] += 1
    return count


def pasted(mixed: Tensor, own: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the box from the second images; all else is from their own."""
    differs = (mixed != own).any(1).any(0)  # (H, W)
    rows, columns = differs.any(1).nonzero().flatten(), differs.any(0).nonzero().flatten()
    expected = own.clone()
    if len(rows):
        box = (..., slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        expected[box] = second[box]
    assert torch.equal(mixed, expected)
    return rows, columns


def test_a_batch_is_mixed_with_the_augmented_images_one_row_up() -> None:
    found, plain = batches(**MIXED)
    assert min(kinds(found, plain).values()) >= 2
    assert len({float(batch.mixed.share[0]) for batch in found if batch.mixed}) == len(found)  # a draw a step
    assert kinds(*batches(cutmix=5.0)) == {"mixup": 0, "cutmix": 9}
    assert kinds(*batches(mixup=1.0)) == {"mixup": 9, "cutmix": 0}


def test_shares_are_drawn_from_beta_and_are_the_pixels() -> None:
    own, second, labels = torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16), torch.tensor([1, 2])
    plain = Batch(own, labels, labels, torch.arange(2), 2, 1, 0, None, Partners(second, labels, labels))
    for mixing in (Mixing(mixup=0.5), Mixing(cutmix=1.0)):
        steps = [mixing(plain._replace(step=step), seed=3) for step in range(400)]
        shares = torch.tensor([float(batch.mixed.share[0]) for batch in steps if isinstance(batch.mixed, Mixed)])
        if mixing.mixup:
            assert shares.mean().item() == pytest.approx(0.5, abs=0.06)
            assert shares.var().item() == pytest.approx(1 / (4 * (2 * 0.5 + 1)), rel=0.15)  # of Beta(a, a)
            continue
        for batch, share in zip(steps, shares, strict=True):
            rows, columns = pasted(batch.inputs, own, second)
            assert 1 - len(rows) * len(columns) / 256 == pytest.approx(share.item(), abs=1e-6)
        own_of_torchvision = v2.CutMix(num_classes=10, alpha=1.0)
        torch.manual_seed(0)
        theirs = torch.stack([own_of_torchvision(own, labels)[1].max(1).values[0] for _ in range(400)])
        assert shares.clamp(1 - shares).mean().item() == pytest.approx(theirs.mean().item(), abs=0.04)


def test_losses_are_those_of_soft_labels() -> None:
    (batch, *_), _ = batches(mixup=1.0)
    assert isinstance(batch.mixed, Mixed)
    soft = F.one_hot(batch.labels, 10).double() * batch.mixed.share[:, None]
    soft += F.one_hot(batch.mixed.labels, 10) * (1 - batch.mixed.share[:, None])
    teacher, student = net(DeepNN, seed=1).double().eval(), net().double().eval()
    kd = Hinton(temperature=3.0, kd_weight=0.6, ce_weight=0.4)
    students = {"ce": (student, CrossEntropy()), "kd": (copy.deepcopy(student), kd)}
    module = Distillation(teacher, students, input_shape=SHAPE).eval()
    logits = student(batch.inputs)
    ce = -(soft * logits.log_softmax(1)).sum(1).mean()
    own, theirs = (logits / 3).log_softmax(1), (teacher(batch.inputs) / 3).softmax(1)
    kd = 9 * (theirs * (theirs.log() - own)).sum(1).mean()
    known = Outputs(teacher(batch.inputs), {})
    _, parts = module.losses((known, dict.fromkeys(students, Outputs(logits, {}))), batch)
    assert parts["ce/loss"].mean().item() == pytest.approx(ce.item(), abs=1e-12)
    assert parts["kd/loss"].mean().item() == pytest.approx((0.6 * kd + 0.4 * ce).item(), abs=1e-12)
    of_classifier = classifier().double().eval().losses(logits, batch)[0]
    assert of_classifier.item() == pytest.approx(ce.item(), abs=1e-12)


def students() -> Distillation:
    return distil({"kd": Hinton(), "sp": SP()})


def ended(devices: int, **options: Any) -> dict[str, Tensor]:
    return weights(fit(students(), digits(**MIXED), devices, **options))


@cache
def alone() -> dict[str, Tensor]:
    return ended(1, precision="64-true")


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_float64_weights_are_the_same_on_any_number_of_processes(devices: int) -> None:
    assert_same(alone(), ended(devices, precision="64-true"), atol=1e-9)


@pytest.mark.slow
def test_exact_bits_are_the_same() -> None:
    one, three = (ended(devices, strategy=DDP(timeout=60, exact=8)) for devices in (1, 3))
    assert_same(one, three)
    assert_same(one, ended(2, strategy=PipelineStrategy(timeout=60, schedule="GPipe", exact=8)))
    assert_same(alone(), ended(1, precision="64-true", strategy=DDP(timeout=60, exact=8)), atol=1e-9)


def test_evaluation_sees_whole_images() -> None:
    mixed, plain = digits(**MIXED, validation_size=20), digits(validation_size=20)
    module = classifier()
    runner = trainer()
    assert runner.test(module, mixed, verbose=False) == trainer().test(module, plain, verbose=False)
