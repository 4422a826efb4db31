"""Training, validation and test samples: seeded, disjoint and stratified by class."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.batch import HIDDEN
from apprentice.errors import BadInput

ROUNDING = 1e-6  # tolerance of a sum of fractions
LISTED = 12  # classes whose counts are listed
HELD_OUT = 0.2  # of samples without a test set, how much to test on
FLOAT_TASKS = MULTILABEL, REGRESSION = "multilabel", "regression"  # whose labels are floats (n, C), NaN where unknown
Subset = Literal["balanced", "proportional"]
LabelledBy = Literal["seed", "split"]


class Source(Protocol):
    """A data set before subsets are drawn: its labels are in memory, its inputs may not be."""

    @property
    def labels(self) -> Tensor:
        """Labels (n,) int64, or (n, T), several for each sample."""

    def take(self, chosen: Tensor) -> "Split":
        """Read the samples at these (k,) places."""


class Split(NamedTuple):
    """Inputs (n, ...) uint8, such as images (n, C, H, W), and labels (n,) or (n, T) int64."""

    inputs: Tensor
    labels: Tensor

    def take(self, chosen: Tensor) -> "Split":
        return Split(self.inputs[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> "Split":
        return Split(self.inputs.to(device), self.labels.to(device))


class Samples(Protocol):
    """Samples in memory, such as a `Split`."""

    @property
    def inputs(self) -> Tensor:
        """(n, ...), whole numbers."""

    @property
    def labels(self) -> Tensor:
        """(n,) or (n, T) int64."""

    def take(self, chosen: Tensor) -> Split:
        """Return the samples at these (k,) places."""

    def to(self, device: torch.device) -> "Samples":
        """Return the samples on a device."""


def as_floats(labels: Tensor, task: str, columns: int, name: str) -> Tensor:
    """Return labels (n, C), or (n,) for C = 1, of a task of `FLOAT_TASKS` as floats; BadInput for others.

    Of several labels a sample, whole numbers may be 1, 0, and -1 where unknown.
    """
    floats = labels if labels.is_floating_point() else labels.float()
    floats = floats[:, None] if floats.dim() == 1 else floats
    if floats.dim() != 2 or floats.shape[1] != columns:
        raise BadInput("data", name, f"labels (n, {columns}) for `task` {task}; they are {tuple(labels.shape)}")
    if task == MULTILABEL:
        if not labels.is_floating_point():
            floats = floats.masked_fill(floats == HIDDEN, torch.nan)
        if wrong := floats[~((floats == 0) | (floats == 1) | floats.isnan())].tolist():
            raise BadInput("data", name, f"labels that are 0, 1, or NaN where unknown; one is {wrong[0]:g}")
    elif floats.isinf().any():
        raise BadInput("data", name, "numbers that are finite, or NaN where unknown; one is infinite")
    return floats


def scale_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation (D,) float64 of the known ones among numbers (n, D); a deviation of 0 counts as 1."""
    mean = labels.double().nanmean(0).nan_to_num()
    std = (labels.double() - mean).square().nanmean(0).sqrt().nan_to_num()
    return mean, std.where(std > 0, 1.0)


def strata(labels: Tensor) -> Tensor:
    """Return (n,) int64, by what samples are drawn in proportion: their classes; samples of other labels are alike."""
    is_class = labels.dim() == 1 and not labels.is_floating_point()
    return labels if is_class else torch.zeros(len(labels), dtype=torch.int64)


def balanced_subset(labels: Tensor, size: int, key: int) -> Tensor:
    """Draw (size,) int64, sorted places in `labels`; class counts differ by at most one until a class is used up.

    Classes take turns with a random sample each, so a smaller subset of the same key lies within a larger one.
    """
    order, turn, _ = _shuffle(labels, key)
    return order[turn.argsort(stable=True)[:size]].sort().values


def proportional_subset(labels: Tensor, size: int, key: int) -> Tensor:
    """Draw (size,) int64, sorted places in `labels`, from each class its proportion, rounded down or up at random.

    The last sample of a class is taken only when nothing else is left. If equal counts are within one sample of all
    proportions, the subset is balanced as in `balanced_subset`.
    """
    order, turn, counts = _shuffle(labels, key)
    classes = labels[order]
    proportion = counts.double() * size / max(len(labels), 1)
    equal = size / max(int(counts.count_nonzero()), 1)
    if (proportion - equal)[counts > 0].abs().lt(1).all():
        proportion.zero_()
    quota = proportion.floor().long()
    rank = (turn - quota[classes]).clamp(min=-1)  # -1: within a class's proportion; beyond that, classes take turns
    rank[turn == counts[classes] - 1] = len(labels)
    return order[rank.argsort(stable=True)[:size]].sort().values


def _shuffle(labels: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random order (n,), the number of earlier samples of each one's class (n,), and the class counts (C,)."""
    order = keyed.permutation(len(labels), key)
    shuffled = labels[order]
    by_class = shuffled.argsort(stable=True)
    counts = shuffled.bincount()
    start = counts.cumsum(0) - counts
    turn = torch.empty_like(order)
    turn[by_class] = torch.arange(len(order)) - start[shuffled[by_class]]
    return order, turn, counts


def complement(places: Tensor, size: int) -> Tensor:
    """Return the places below `size` without these, sorted."""
    others = torch.ones(size, dtype=torch.bool)
    others[places] = False
    return others.nonzero().flatten()


def describe_imbalance(labels: Tensor, class_names: Sequence[str]) -> str:
    """Return the class counts as text; "" if they differ by no more than one or a tenth."""
    if labels.dim() > 1:
        return ""
    counts = labels.bincount(minlength=len(class_names)).tolist()
    least, most = min(counts), max(counts)
    if most - least <= max(1, least / 10):
        return ""
    if len(counts) <= LISTED:
        return ", ".join(f"{name} {count}" for name, count in zip(class_names, counts, strict=True))
    return f"from {least} ({class_names[counts.index(least)]}) to {most} ({class_names[counts.index(most)]})"


def describe_drawn(sizes: Mapping[str, int], tested: Tensor, class_names: Sequence[str], seed: int) -> str:
    """Say how many samples of each part were drawn, and which classes have none in the test labels `tested`."""
    counts = tested.bincount(minlength=len(class_names)).tolist() if tested.dim() == 1 else [1] * len(class_names)
    untested = [name for name, count in zip(class_names, counts, strict=True) if not count]
    drawn = ", ".join(f"{part} {count:,}" for part, count in sizes.items())
    missing = f"; too small to be tested: {', '.join(untested)}" if untested else ""
    how = "split by class" if len(class_names) > 1 and not tested.is_floating_point() else "split"
    return f"there is no test set: {how}, as seed {seed} draws: {drawn}{missing}"


def check_sizes(train_size: int | None, test_size: float | None, validation_size: float, subset: Subset) -> None:
    """Raise BadInput for sizes that no data set can have."""
    if subset not in get_args(Subset):
        raise BadInput("data.subset", subset, " or ".join(get_args(Subset)))
    if train_size is not None and (not isinstance(train_size, int) or train_size < 1):
        raise BadInput("data.train_size", train_size, "a whole number of at least 1, or nothing for all samples")
    if test_size is not None and not (test_size >= 1 if isinstance(test_size, int) else 0 < test_size < 1):
        expected = "a count (1, 2, …), a fraction (0.0 < f < 1.0), or nothing for all samples"
        raise BadInput("data.test_size", test_size, expected)
    whole = isinstance(validation_size, int)
    if not (whole and validation_size >= 0) and not (not whole and 0 <= validation_size < 1):
        raise BadInput("data.validation_size", validation_size, "a count (0, 1, 2, …) or a fraction (0.0 <= f < 1.0)")


def check_labelled_by(labelled_by: LabelledBy, labelled: int | None) -> None:
    """Raise BadInput for what can't draw labelled samples, or has none to draw."""
    if labelled_by not in get_args(LabelledBy):
        raise BadInput("data.labelled_by", labelled_by, " or ".join(get_args(LabelledBy)))
    if labelled_by == "split" and labelled is None:
        raise BadInput("data.labelled_by", labelled_by, "`data.labelled N` beside it: all samples have labels")


def draw_labelled(labels: Tensor, size: int, key: int) -> Tensor:
    """Draw the `size` of n samples whose labels are known, (n,) bool: a balanced subset, which larger ones contain."""
    if labels.dim() > 1:
        raise BadInput("data.labelled", size, f"not allowed, as a sample has {labels.shape[1]} labels, not one")
    classes = len(labels.unique())
    if not classes <= size <= len(labels):
        expected = (
            f"{classes} to {len(labels)}: a sample of each class or more, up to all that train; or nothing for all"
        )
        raise BadInput("data.labelled", size, expected)
    has_label = torch.zeros(len(labels), dtype=torch.bool)
    has_label[balanced_subset(labels, size, key)] = True
    return has_label


def check_partition(partition: Sequence[float] | None, replicas: int | None = None, exact: int | None = None) -> None:
    """Raise BadInput for fractions that can't be partitions, or not of this number of replicas, or under `exact`."""
    if partition is None:
        return
    if not partition or not all(math.isfinite(f) and f >= 0 for f in partition) or abs(sum(partition) - 1) > ROUNDING:
        raise BadInput("data.partition", list(partition), "fractions of at least 0 that add up to 1, as [0.7,0.2,0.1]")
    if exact is not None:
        raise BadInput(
            "data.partition", list(partition), "not allowed with `exact`, which cuts a batch whoever computes it"
        )
    if replicas not in {None, len(partition)}:
        expected = f"{replicas} fractions, one for each device that trains" if replicas != 1 else "none on one device"
        raise BadInput("data.partition", list(partition), expected)


def count_held_out(validation_size: float, size: int) -> int:
    """Return the number of samples to hold out in addition to `size` training samples, or from a set of `size`."""
    return validation_size if isinstance(validation_size, int) else round(validation_size * size)


class Sizes(NamedTuple):
    """How much is drawn for each part, and how: the options of InMemoryData."""

    train: int | None
    validation: float
    test: float | None
    subset: Subset
    seed: int


def draw_parts(labels: Sequence[Tensor], sizes: Sizes, groups: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw places for training, validation and testing, each sorted.

    `labels` are those of the training set, then of the test set and of a validation set, if there are such; samples of
    several labels are drawn as if of one class. The validation set is used whole, unless its size is 0.
    Without a test set all parts are drawn from the training set, and `groups` (n,) of it are not split.
    """
    training, *others = map(strata, labels)
    if others:
        rest, test = torch.arange(len(training)), draw_test(others[0], sizes.test, sizes.seed, sizes.subset)
    else:
        test = hold_out_test(training, sizes.test, sizes.seed, groups)
        rest = complement(test, len(training))
    of_rest = None if groups is None else groups[rest]
    held_out = 0 if len(others) > 1 else sizes.validation
    places = draw_train_and_validation(training[rest], sizes.train, held_out, sizes.seed, sizes.subset, of_rest)
    train, validation = (rest[drawn] for drawn in places)
    if len(others) > 1:
        validation = torch.arange(len(others[1]) if sizes.validation else 0)
    return train, validation, test


def draw_train_and_validation(
    labels: Tensor,
    train_size: int | None,
    validation_size: float,
    seed: int,
    subset: Subset,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw disjoint places in `labels` for training and for validation, each sorted; BadInput if there are too few.

    Validation samples are drawn first, in proportion to the classes, and as `draw_whole_groups` does if there are
    `groups`; if `validation_size` is a count, they are the same for any `train_size`. At least one sample of each class
    is for training.
    """
    available, classes = len(labels), len(labels.unique())
    count = count_held_out(validation_size, available if train_size is None else train_size)
    if count > available - classes and (train_size is None or isinstance(validation_size, int)):
        most = f"at most {available - classes} of the {available} training samples, as one of each class has to train"
        raise BadInput("data.validation_size", validation_size, most)
    if train_size is not None and train_size < classes:
        raise BadInput("data.train_size", train_size, f"at least {classes}, one sample of each class")
    if train_size is not None and train_size + count > available:
        largest = next(n for n in range(available, -1, -1) if n + count_held_out(validation_size, n) <= available)
        most = f"at most {largest} of the {available} training samples, as `data.validation_size` is {validation_size}"
        raise BadInput("data.train_size", train_size, most)
    validation = draw_whole_groups(labels, count, keyed.fold_in(seed, 0), groups)
    check_drawn(len(validation), count, "validation")
    train = complement(validation, available)
    if train_size is not None:
        if train_size > len(train):  # whole groups may be more than was asked for
            raise BadInput("data.train_size", train_size, f"at most {len(train)}: near duplicates stay in one part")
        train = train[draw_places(labels[train], train_size, keyed.fold_in(seed, 1), subset)]
    return train, validation


def draw_test(labels: Tensor, test_size: float | None, seed: int, subset: Subset) -> Tensor:
    """Draw places in `labels` for testing, sorted; all without a size. Raise BadInput if there are fewer samples."""
    size = len(labels) if test_size is None else max(count_held_out(test_size, len(labels)), 1)
    if size > len(labels):
        raise BadInput("data.test_size", test_size, f"at most {len(labels)}, the test samples there are")
    return draw_places(labels, size, keyed.fold_in(seed, 2), subset)


def hold_out_test(labels: Tensor, test_size: float | None, seed: int, groups: Tensor | None) -> Tensor:
    """Draw places in `labels` for testing, sorted, in proportion to the classes, where there is no test set.

    By default `HELD_OUT` of them. At least one sample of each class is left; BadInput if there are too few.
    """
    available, classes = len(labels), len(labels.unique())
    size = max(count_held_out(HELD_OUT if test_size is None else test_size, available), 1)
    if size > available - classes:
        expected = f"at most {available - classes} of the {available} samples, as one of each class has to train"
        raise BadInput("data.test_size", test_size, f"{expected}: there is no test set to draw from")
    drawn = draw_whole_groups(labels, size, keyed.fold_in(seed, 7), groups)
    check_drawn(len(drawn), size, "test")
    return drawn


def check_drawn(drawn: int, wanted: int, part: str) -> None:
    """Raise BadInput if whole groups of near duplicates make up less than half of the samples wanted for a part."""
    if 2 * drawn < wanted:
        expected = f"false: groups of near duplicates are too large to part; {drawn} of {wanted} {part} samples are"
        raise BadInput("data.group_duplicates", "true", f"{expected} drawn of whole groups")


def draw_whole_groups(labels: Tensor, size: int, key: int, groups: Tensor | None = None) -> Tensor:
    """Draw sorted places in `labels`, from each class its proportion; samples of one of the `groups` (n,) all or none.

    Without groups of several samples it is `proportional_subset`, and the result is (size,). Otherwise each class has
    as many as there, if groups can be chosen so: in a random order, a group is taken if it exceeds the count of no
    class by more than half of its samples in that class, and leaves one sample of it.
    """
    drawn = proportional_subset(labels, size, key)
    if groups is None or len(groups.unique()) == len(groups):
        return drawn
    counts, classes = labels.bincount(), labels.tolist()
    quota, spare = labels[drawn].bincount(minlength=len(counts)).tolist(), (counts - 1).tolist()
    members, places = dict[int, list[int]](), list[int]()
    for place, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(place)
    in_order = list(members.values())
    for number in keyed.permutation(len(in_order), key, 1).tolist():
        of_classes = Counter(classes[place] for place in in_order[number])
        if all(2 * quota[label] >= count and spare[label] >= count for label, count in of_classes.items()):
            places += in_order[number]
            for label, count in of_classes.items():
                quota[label] -= count
                spare[label] -= count
    return torch.tensor(sorted(places), dtype=torch.int64)


def draw_places(labels: Tensor, size: int, key: int, subset: Subset) -> Tensor:
    """Draw (size,) int64, sorted places in `labels`, stratified as `subset` says, with every class if possible."""
    if subset == "balanced":
        return balanced_subset(labels, size, key)
    return complement(proportional_subset(labels, len(labels) - size, key), len(labels))
