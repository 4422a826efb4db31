"""Which labels of a training set are known, and what the batches of each rank say of them."""

from typing import Any

import pytest
import torch

from apprentice.batch import HIDDEN, Batch
from apprentice.errors import BadInput
from datamodules import Digits
from datamodules.loaders import TrainLoader
from tests.training import digits


def loader(data: Digits, rank: int = 0, replicas: int = 1) -> TrainLoader:
    data._rank_and_replicas = lambda: (rank, replicas)  # type: ignore[method-assign]
    return data.train_dataloader()


def known(data: Digits) -> set[int]:
    """Places of the samples whose labels an epoch shows."""
    return {i for b in loader(data) for i, y in zip(b.index.tolist(), b.labels.tolist(), strict=True) if y != HIDDEN}


@pytest.mark.parametrize("partition", [None, [0.7, 0.3, 0.0]])
@pytest.mark.parametrize("labelled", [10, 75])
def test_every_share_has_the_weight_of_the_global_batch(labelled: int, partition: list[float] | None) -> None:
    data = digits(train_size=75, batch_size=8, labelled=labelled, partition=partition)
    truth, seen = data.split("train").labels, 0
    for shares in zip(*(loader(data, rank, 3) for rank in range(3)), strict=True):
        count = sum(len(share.labels) for share in shares)
        labels = torch.cat([share.labels for share in shares])
        right = truth[torch.cat([share.index for share in shares])]
        m = int((labels != HIDDEN).sum())
        seen += m
        assert all(share.label_weight == count / max(m, 1) for share in shares)
        assert torch.equal(labels, right.where(labels != HIDDEN, HIDDEN))
    assert seen == labelled


def test_known_samples_are_balanced_nested_and_depend_on_the_datas_seed_alone() -> None:
    few, more = (digits(labelled=n) for n in (23, 60))
    assert known(few) < known(more)
    counts = few.split("train").labels[sorted(known(few))].bincount()
    assert sorted(counts.tolist()) == [2] * 7 + [3] * 3
    again, other = digits(labelled=23, batch_size=5), digits(labelled=23, seed=1)
    again.order_seed = 5
    assert known(again) == known(few) != known(other)


def test_the_option_changes_no_sample_and_hides_nothing_else() -> None:
    plain, few = digits(validation_size=20), digits(validation_size=20, labelled=10)
    for part in ("train", "validation", "test"):
        for one, other in zip(plain.split(part), few.split(part), strict=True):
            assert torch.equal(one, other)
    loaders: Any = [(d.val_dataloader(), d.test_dataloader(), d.train_in_order()) for d in (plain, few)]
    for mine, other in zip(*loaders, strict=True):
        assert all(equal(*pair) for pair in zip(mine, other, strict=True))
    few.hides_labels = False
    assert all(equal(*pair) for pair in zip(loader(plain), loader(few), strict=True))


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("labelled", [-1, 0, 9, 102])
def test_a_number_that_no_training_set_has_is_refused(labelled: int) -> None:
    with pytest.raises(BadInput, match=rf"^data.labelled {labelled}: expected 10 to 101: "):
        digits(labelled=labelled)
