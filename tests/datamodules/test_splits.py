"""Splits and subsets: by class, disjoint, a function of the data's seed alone; wrong sizes are refused in one line."""

from typing import Any

import pytest
import torch

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules import Digits, ImageData
from datamodules.splits import Split, balanced_subset, draw_train_and_validation, proportional_subset
from tests.commands import bad_input

LABELS = torch.tensor([0] * 50 + [1] * 7 + [2] * 30 + [4] * 20)[keyed.permutation(107, 0)]  # no sample of class 3


class Numbered(ImageData):
    """Samples whose only pixel is their place in the whole set."""

    input_shape, class_names, mean, std = (1, 1, 1), tuple("01234"), (0.0,), (1.0,)
    reads = 0

    def read(self) -> tuple[Split, Split]:
        self.reads += 1
        whole = Split(torch.arange(107, dtype=torch.uint8).view(-1, 1, 1, 1), LABELS)
        return whole, whole


def places(data: ImageData, part: str) -> list[int]:
    return data.split(part).inputs.flatten().tolist()


@pytest.mark.parametrize("size", [0, 1, 3, 4, 6, 28, 29, 50, 106, 107])
def test_subset_is_sorted_distinct_and_balanced_while_classes_last(size: int) -> None:
    chosen = balanced_subset(LABELS, size, key=5)
    assert len(chosen) == size
    assert torch.equal(chosen, chosen.unique())
    have, taken = LABELS.bincount(), LABELS[chosen].bincount(minlength=5)
    most = taken.max()
    assert ((taken == have) | (taken >= most - 1)).all()


def test_subsets_are_nested_random_and_keyed() -> None:
    small, large = balanced_subset(LABELS, 20, key=5), balanced_subset(LABELS, 21, key=5)
    assert set(small.tolist()) < set(large.tolist())
    assert not torch.equal(small, balanced_subset(LABELS, 20, key=6))
    one = {LABELS[balanced_subset(LABELS, 1, key)].item() for key in range(30)}
    assert one == {0, 1, 2, 4}  # which class gives the odd sample is drawn too


@pytest.mark.parametrize("counts", [[50, 7, 30, 0, 20], [1000, 50], [1, 1, 1, 100], [2, 2, 3], [40] * 3], ids=str)
def test_classes_are_held_out_in_proportion_and_each_goes_on_training(counts: list[int]) -> None:
    have = torch.tensor(counts)
    labels = torch.arange(len(counts)).repeat_interleave(have)[keyed.permutation(sum(counts), 0)]
    for count in range(0, sum(counts) - have.count_nonzero() + 1, max(sum(counts) // 40, 1)):
        train, validation = draw_train_and_validation(labels, None, count, seed=0, subset="balanced")
        assert sorted([*train.tolist(), *validation.tolist()]) == list(range(sum(counts)))
        held = labels[validation].bincount(minlength=len(counts))
        assert (held < have)[have > 0].all()
        assert held.sum() == count
        keeping = (have - 1).clamp(min=0)
        proportion = torch.minimum(have * count / sum(counts), keeping)
        spared = count - proportion.sum()  # what classes of one sample do not give
        assert ((held - proportion > -2) & (held - proportion < 2 + spared)).all(), (count, held)


def test_a_tenth_of_an_unequal_set_leaves_both_classes() -> None:
    labels = torch.tensor([0] * 1000 + [1] * 50)
    train, validation = draw_train_and_validation(labels, None, 0.1, seed=0, subset="balanced")
    assert labels[train].bincount().tolist() == [900, 45]
    assert labels[validation].bincount().tolist() == [100, 5]


@pytest.mark.parametrize("size", [0, 1, 5, 29, 30, 71, 89, 90])
def test_of_equal_classes_those_are_held_out_that_took_turns(size: int) -> None:
    """Balanced sets keep their splits, and so does Digits, whose classes are nearly equal."""
    labels = torch.arange(3).repeat(30)
    assert torch.equal(proportional_subset(labels, size, key=5), balanced_subset(labels, size, key=5))
    labels = Digits(validation_size=0).split("train").labels
    for count in (40, 50, 144):
        assert torch.equal(proportional_subset(labels, count, key=size), balanced_subset(labels, count, key=size))


def test_subsets_are_balanced_or_proportional() -> None:
    def counts(subset: str, size: int, part: str) -> list[int]:
        data = Numbered(train_size=size, test_size=size, validation_size=0, subset=subset)
        return data.split(part).labels.bincount(minlength=5).tolist()

    for part in ("train", "test"):
        assert sorted(counts("balanced", 40, part)) == [0, 7, 11, 11, 11]
        assert counts("balanced", 100, part) == [43, 7, 30, 0, 20]
        assert counts("proportional", 107, part) == [50, 7, 30, 0, 20]
        taken = torch.tensor(counts("proportional", 40, part))
        assert ((taken - LABELS.bincount() * 40 / 107).abs() < 1).all()
        assert counts("proportional", 4, part) == [1, 1, 1, 0, 1]
    assert Numbered(test_size=2, subset="proportional").sizes["test"] == 2


def test_counts_of_classes_are_told_where_they_are_unequal(capsys: pytest.CaptureFixture[str]) -> None:
    Numbered(validation_size=0).setup()
    assert capsys.readouterr().err == "Numbered: training samples of a class: 0 50, 1 7, 2 30, 3 0, 4 20\n"

    class Many(Numbered):
        class_names = tuple(f"c{i}" for i in range(20))

    Many(validation_size=0).setup()
    assert capsys.readouterr().err == "Many: training samples of a class: from 0 (c3) to 50 (c0)\n"
    for options in ({}, {"train_size": 13}):  # 128 to 132 of each, 1 or 2
        Digits(**options).setup()
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("train_size", "validation_size", "train", "validation"),
    [
        (None, 0, 107, 0),
        (None, 0.1, 96, 11),
        (None, 20, 87, 20),
        (107, 0, 107, 0),
        (40, 0.25, 40, 10),
        (40, 20, 40, 20),
        (97, 0.1, 97, 10),
        (None, 0.0, 107, 0),
    ],
)
def test_sizes_are_those_asked_for(train_size: int | None, validation_size: float, train: int, validation: int) -> None:
    data = Numbered(train_size=train_size, validation_size=validation_size, test_size=31)
    assert data.sizes == {"train": train, "validation": validation, "test": 31}
    assert not set(places(data, "train")) & set(places(data, "validation"))
    for part in ("train", "validation", "test"):
        assert torch.equal(data.split(part).labels, LABELS[places(data, part)])
    if train + validation == 107:
        assert sorted(places(data, "train") + places(data, "validation")) == list(range(107))


def test_splits_depend_on_the_datas_seed_alone() -> None:
    one, same, other = (Numbered(train_size=40, test_size=30, seed=seed) for seed in (0, 0, 1))
    same.order_seed = 9
    for part in ("train", "validation", "test"):
        assert places(one, part) == places(same, part)
        assert places(one, part) != places(other, part)
    held = [places(Numbered(train_size=size, validation_size=20), "validation") for size in (10, 40, None)]
    assert held[0] == held[1] == held[2]


def test_data_is_read_once() -> None:
    data = Numbered()
    for stage in ("fit", "test", None):
        data.prepare_data()
        data.setup(stage)
    assert data.reads == 1


def test_digits_have_a_fixed_stratified_split() -> None:
    one, other = Digits(validation_size=0), Digits(validation_size=0, seed=7, batch_size=3)
    assert one.sizes == {"train": 1437, "validation": 0, "test": 360}
    for part in ("train", "test"):
        assert torch.equal(one.split(part).inputs, other.split(part).inputs)
    assert one.split("test").labels.bincount().tolist() == [36] * 10
    images = one.split("train").inputs
    assert (images.shape[1:], images.dtype, int(images.max())) == (one.input_shape, torch.uint8, 16)
    assert (one.num_classes, one.name, one.class_names[3]) == (10, "Digits", "3")


REFUSED: list[tuple[type[ImageData], dict[str, Any], str]] = [
    (Digits, {"batch_size": 0}, "data.batch_size 0: expected a whole number of at least 1"),
    (Digits, {"batch_size": 1.5}, "data.batch_size 1.5: expected a whole number of at least 1"),
    (Digits, {"train_size": 0}, "data.train_size 0: expected a whole number of at least 1"),
    (Digits, {"train_size": -4}, "data.train_size -4: expected a whole number"),
    (Digits, {"test_size": 0}, "data.test_size 0: expected a count"),
    (Digits, {"validation_size": -1}, "data.validation_size -1: expected a count"),
    (Digits, {"validation_size": 1.0}, "data.validation_size 1.0: expected a count"),
    (Digits, {"validation_size": -0.1}, "data.validation_size -0.1: expected a count"),
    (Digits, {"validation_size": float("nan")}, "data.validation_size nan: expected a count"),
    (Digits, {"subset": "random"}, "data.subset random: expected balanced or proportional"),
    (Digits, {"partition": [0.7, 0.2]}, "data.partition [0.7, 0.2]: expected fractions of at least 0 that add up to"),
    (Digits, {"partition": [1.5, -0.5]}, "data.partition [1.5, -0.5]: expected fractions of at least 0"),
    (Digits, {"partition": [float("nan"), 1.0]}, "data.partition [nan, 1.0]: expected fractions"),
    (Digits, {"partition": []}, "data.partition []: expected fractions"),
    (Numbered, {"train_size": 108, "validation_size": 0}, "data.train_size 108: expected at most 107 of the 107"),
    (Numbered, {"train_size": 107}, "data.train_size 107: expected at most 97 of the 107 training samples, as `data"),
    (Numbered, {"train_size": 90, "validation_size": 20}, "data.train_size 90: expected at most 87 of the 107"),
    (
        Numbered,
        {"validation_size": 104},
        "data.validation_size 104: expected at most 103 of the 107 training samples, as",
    ),
    (Numbered, {"train_size": 4, "validation_size": 200}, "data.validation_size 200: expected at most 103 of the 107"),
    (Numbered, {"train_size": 3}, "data.train_size 3: expected at least 4, one sample of each class"),
    (Numbered, {"test_size": 108}, "data.test_size 108: expected at most 107"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED, ids=str)
def test_options_that_no_set_has_are_refused_naming_the_largest(kind: Any, options: dict, message: str) -> None:
    assert bad_input(lambda: kind(**options).setup()).startswith(message)


MIXING: list[tuple[dict[str, Any], str]] = [
    ({"mixup": -1.0}, "data.mixup -1.0: expected a number of 0 or more"),
    ({"cutmix": float("nan")}, "data.cutmix nan: expected a number of 0 or more"),
    (
        {"mixup": 1.0, "labelled": 50},
        "data.labelled 50: expected all labels, as `data.mixup` and `data.cutmix` mix them",
    ),
]


@pytest.mark.parametrize(("options", "line"), MIXING, ids=str)
def test_what_can_not_be_mixed_is_refused(options: dict[str, Any], line: str) -> None:
    assert bad_input(Digits, **options) == line


@pytest.mark.parametrize("validation_size", [0, 1, 13, 0.1, 0.37, 0.5, 0.99])
def test_the_largest_size_named_is_the_largest(validation_size: float) -> None:
    line = bad_input(draw_train_and_validation, LABELS, 10_000, validation_size, seed=0, subset="balanced")
    largest = int(line.split("at most ")[1].split()[0])
    assert len(draw_train_and_validation(LABELS, largest, validation_size, seed=0, subset="balanced")[0]) == largest
    with pytest.raises(BadInput):
        draw_train_and_validation(LABELS, largest + 1, validation_size, seed=0, subset="balanced")
