"""torchvision's transforms draw by seed, epoch and sample: the same bits in any company, its own statistics."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from apprentice.errors import BadInput
from datamodules import CIFAR10, Digits, Transforms
from tests.training import assert_same, classifier, fit, weights

SHAPE = (3, 16, 16)
MANY: list[Any] = [
    "RandomResizedCrop",
    "RandomHorizontalFlip",
    {"ColorJitter": {"brightness": 0.4, "hue": 0.1}},
    "RandAugment",
    {"RandomApply": {"transforms": [{"RandomErasing": {"value": "random", "p": 1.0}}], "p": 0.5}},
]


def images(count: int) -> Tensor:
    return torch.randint(256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_an_image_is_the_same_in_any_company_and_leaves_the_generators_alone() -> None:
    before, index, transform = images(24), torch.arange(24) + 100, Transforms(MANY, SHAPE)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    together = transform(before, 7, index)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    torch.manual_seed(9)
    alone = torch.cat([Transforms(MANY, SHAPE)(before[i : i + 1], 7, index[i : i + 1]) for i in range(24)])
    assert torch.equal(alone, together)
    assert torch.equal(transform(before.flip(0), 7, index.flip(0)).flip(0), together)
    for other in (transform(before, 8, index), transform(before, 7, index + 1)):
        assert (other != together).flatten(1).any(1).float().mean() > 0.9
    assert transform(before[:0], 7, index[:0]).shape == (0, *SHAPE)


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
    ours = Transforms([entry], SHAPE)(ramp.expand(count, *SHAPE), 1, torch.arange(count)).float()
    torch.manual_seed(0)
    other = torch.stack([theirs(ramp) for _ in range(count)]).float()
    for of in (lambda x: x.mean((1, 2, 3)), lambda x: x.std((1, 2, 3)), lambda x: x[:, 0, 5, 9]):
        a, b = of(ours), of(other)
        error = ((a.var() + b.var()) / count).sqrt()
        assert abs(a.mean() - b.mean()) < 4 * error
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.12)


def test_half_of_the_images_are_mirrored() -> None:
    before = images(1)
    after = Transforms(["RandomHorizontalFlip"], SHAPE)(before.expand(2000, *SHAPE), 5, torch.arange(2000))
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
    with pytest.raises(BadInput) as error:
        Transforms(["RandomHorizontalFlip", entry], SHAPE)
    assert str(error.value).startswith(f"data.transforms {message}")
    assert "\n" not in str(error.value)


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
        with pytest.raises(BadInput) as error:
            CIFAR10(**options)
        assert str(error.value) == message
    with pytest.raises(BadInput, match="a list of 1 number, one a channel"):
        Digits(mean=[0.1, 0.2, 0.3])
