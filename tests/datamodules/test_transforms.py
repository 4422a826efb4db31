"""Transforms draw by seed, epoch and sample; mixup and CutMix by their formulas, on any number of devices."""

import copy
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from apprentice.batch import Batch, Mixed, Partners
from apprentice.errors import BadInput
from datamodules import CIFAR10, Digits, Transforms
from datamodules.mixing import Mixing
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import SP, CrossEntropy, Hinton
from strategies import DDP, PipelineStrategy
from tests.callbacks import Seen
from tests.commands import bad_input
from tests.training import SHAPE, assert_same, classifier, digits, distil, fit, net, trainer, weights

LARGER = (3, 16, 16)
MANY: list[Any] = [
    "RandomResizedCrop",
    "RandomHorizontalFlip",
    {"ColorJitter": {"brightness": 0.4, "hue": 0.1}},
    "RandAugment",
    {"RandomApply": {"transforms": [{"RandomErasing": {"value": "random", "p": 1.0}}], "p": 0.5}},
]


def images(count: int) -> Tensor:
    return torch.randint(256, (count, *LARGER), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_an_image_is_the_same_in_any_company_and_leaves_the_generators_alone() -> None:
    before, index, transform = images(24), torch.arange(24) + 100, Transforms(MANY, LARGER)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    together = transform(before, 7, index)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    torch.manual_seed(9)
    alone = torch.cat([Transforms(MANY, LARGER)(before[i : i + 1], 7, index[i : i + 1]) for i in range(24)])
    assert torch.equal(alone, together)
    assert torch.equal(transform(before.flip(0), 7, index.flip(0)).flip(0), together)
    for other in (transform(before, 8, index), transform(before, 7, index + 1)):
        assert (other != together).flatten(1).any(1).float().mean() > 0.9
    assert transform(before[:0], 7, index[:0]).shape == (0, *LARGER)


@pytest.mark.parametrize(
    ("entry", "theirs"),
    [
        ("RandomResizedCrop", v2.RandomResizedCrop([16, 16])),
        ({"RandomCrop": {"padding": 4}}, v2.RandomCrop([16, 16], padding=4)),
        ({"ColorJitter": {"brightness": 0.8}}, v2.ColorJitter(brightness=0.8)),
        ({"RandomErasing": {"p": 0.3}}, v2.RandomErasing(p=0.3)),
    ],
)
def test_statistics_are_those_of_torchvisions_own_draws(entry: Any, theirs: v2.Transform) -> None:
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, 16, 16)  # a pixel's value is its place
    count = 1500
    ours = Transforms([entry], LARGER)(ramp.expand(count, *LARGER), 1, torch.arange(count)).float()
    torch.manual_seed(0)
    other = torch.stack([theirs(ramp) for _ in range(count)]).float()
    for of in (lambda x: x.mean((1, 2, 3)), lambda x: x.std((1, 2, 3)), lambda x: x[:, 0, 5, 9]):
        a, b = of(ours), of(other)
        error = ((a.var() + b.var()) / count).sqrt()
        assert abs(a.mean() - b.mean()) < 4 * error
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.12)


def test_half_of_the_images_are_mirrored() -> None:
    before = images(1)
    after = Transforms(["RandomHorizontalFlip"], LARGER)(before.expand(2000, *LARGER), 5, torch.arange(2000))
    mirrored = (after == before.flip(3)).flatten(1).all(1)
    assert ((after == before).flatten(1).all(1) | mirrored).all()
    assert abs(mirrored.float().mean().item() - 0.5) < 0.04  # four deviations


class Noisy:
    def __call__(self, image: Tensor) -> Tensor:
        drawn = random.randrange(8), np.random.randint(8), torch.randint(8, ())  # noqa: NPY002
        return image.roll(sum(map(int, drawn)), -1)


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_training_with_them_is_the_same_on_any_number_of_processes(devices: int) -> None:
    options = {"batch_size": 37, "train_size": 112, "test_size": 20, "transforms": ["RandomHorizontalFlip", Noisy()]}
    kwargs: dict[str, Any] = {"max_epochs": 2, "precision": "64-true"}
    ended = weights(fit(classifier(), Digits(**options), devices, **kwargs))
    if devices > 1:
        assert_same(ended, weights(fit(classifier(), Digits(**options), **kwargs)), atol=1e-9)
    else:
        plain = weights(fit(classifier(), Digits(**options | {"transforms": None}), **kwargs))
        assert any(not torch.equal(ended[name], plain[name]) for name in ended)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("RandomCrp", "RandomCrp: expected a class of torchvision.transforms.v2; near: RandomCrop"),
        ("RandomErasing2.Missing", "RandomErasing2.Missing: expected an import path; No module named"),
        ({"RandomErasing": {"q": 1}}, "RandomErasing: expected options that it takes:"),
        ({"RandomErasing": 1}, "{'RandomErasing': 1}: expected a name in torchvision.transforms.v2, an import path"),
        (3, "3: expected a name in torchvision.transforms.v2, an import path, or one of them with options"),
        ({"Resize": {"size": 4}}, "Resize: expected a transform that keeps images uint8 of (3, 16, 16); it gives"),
        ({"ToDtype": {"dtype": torch.float32}}, "ToDtype: expected a transform that keeps images uint8 of"),
        ({"Normalize": {"mean": [0], "std": [1]}}, "Normalize: expected a transform of one (3, 16, 16) image; it"),
        ({"CutMix": {"num_classes": 10}}, "CutMix: expected a transform of one (3, 16, 16) image; it failed:"),
    ],
)
def test_what_is_no_transform_of_one_image_is_refused(entry: Any, message: str) -> None:
    assert bad_input(Transforms, ["RandomHorizontalFlip", entry], LARGER).startswith(f"data.transforms {message}")


def test_mean_and_deviation_of_every_set_can_be_given() -> None:
    data = CIFAR10(mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.5])
    white = data.normalize(torch.full((1, 3, 32, 32), 255, dtype=torch.uint8))
    assert white[0, :, 0, 0].tolist() == [2, 2, 1]
    refused: dict[str, dict[str, Any]] = {
        "data.mean [0.5]: expected a list of 3 numbers, one a channel": {"mean": [0.5]},
        "data.std [1, 0, 1]: expected a list of 3 numbers, one a channel, above 0": {"std": [1, 0, 1]},
        "data.mean [1.0, nan, 1.0]: expected a list of 3 numbers, one a channel": {"mean": [1.0, float("nan"), 1.0]},
    }
    for message, options in refused.items():
        assert bad_input(CIFAR10, **options) == message
    with pytest.raises(BadInput, match="a list of 1 number, one a channel"):
        Digits(mean=[0.1, 0.2, 0.3])


MIXED: dict[str, Any] = {"augment": True, "mixup": 0.8, "cutmix": 1.0}


def batches(**options: Any) -> tuple[list[Batch], list[Batch]]:
    def seen(data: Digits) -> list[Batch]:
        seen = Seen()
        fit(classifier(), data, precision="64-true", max_epochs=3, callbacks=[seen])
        return seen.train

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
