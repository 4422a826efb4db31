"""Whose samples are whose, and which labels are known: fixed by the seed, and a loss is the global batch's mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice import keyed
from apprentice.batch import HIDDEN, Batch
from apprentice.errors import BadInput
from datamodules import Digits, splits
from datamodules.loaders import EpochOrder, PartitionedOrder, TrainLoader
from experiments import hardware, kd
from harness.runs.quiet import quiet
from lab.strategies import ParamServer
from strategies import DDP, DataParallel
from tests.callbacks import SaveAndStop
from tests.datamodules.test_loading import equal
from tests.strategies.test_strategies import STEPS
from tests.training import LinesLogger, assert_same, digits, distillation, fit, trainer, weights

FRACTIONS = [0.7, 0.2, 0.1]


def epochs(fractions: list[float], count: int = 2, size: int = 112, seed: int = 0) -> list[list[list[Batch]]]:
    split = digits(train_size=size).split("train")
    ranks = len(fractions)
    loaders = [TrainLoader(split, 37, PartitionedOrder(fractions, 5, size, seed), r, ranks) for r in range(ranks)]
    found = []
    for epoch in range(count):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        found.append([list(loader) for loader in loaders])
    return found


def seen(batches: list[Batch]) -> Tensor:
    return torch.cat([batch.index for batch in batches])


@pytest.mark.parametrize("fractions", [FRACTIONS, [0.5, 0.5], [1.0], [0.99, 0.0, 0.01], [1 / 3] * 3])
def test_each_rank_has_a_fixed_share_in_proportion(fractions: list[float]) -> None:
    first, second = epochs(fractions)
    shares = [seen(batches) for batches in first]
    assert torch.cat(shares).sort().values.tolist() == list(range(112))
    for share, fraction, later in zip(shares, fractions, second, strict=True):
        assert abs(len(share) - 112 * fraction) <= 1
        assert set(seen(later).tolist()) == set(share.tolist())
        assert len(share) < 5 or not seen(later).equal(share)  # in another order
    other = [seen(batches) for batches in epochs(fractions, 1, seed=1)[0]]
    assert [set(share.tolist()) for share in other] == [set(share.tolist()) for share in shares]


@pytest.mark.parametrize("fractions", [FRACTIONS, [0.5, 0.5], [0.99, 0.0, 0.01]])
def test_a_global_batch_is_whole_and_shared_in_proportion(fractions: list[float]) -> None:
    for batches in zip(*epochs(fractions)[1], strict=True):  # strict: all ranks have the same number
        count = batches[0].count
        assert count in {37, 1}
        assert {(batch.count, batch.replicas) for batch in batches} == {(count, len(fractions))}
        assert torch.cat([batch.rows for batch in batches]).sort().values.tolist() == list(range(count))
        for batch, fraction in zip(batches, fractions, strict=True):
            assert abs(len(batch.labels) - count * fraction) <= len(fractions) - 1


class Whole(PartitionedOrder):
    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        return torch.arange(count)


class Together(Digits):
    def check_replicas(self, replicas: int, exact: int | None = None) -> None:
        pass

    def _order(self, size: int) -> EpochOrder:
        shares: Any = super()._order(size)
        whole: Any = Whole.__new__(Whole)
        whole.__dict__.update(vars(shares))
        return whole


@pytest.mark.parametrize(
    ("strategy", "fractions", "devices"),
    [(DDP, FRACTIONS, 3), pytest.param(ParamServer, [0.9, 0.1], 3, marks=pytest.mark.slow)],
)
def test_float64_agrees_with_one_process(
    strategy: type[DataParallel], fractions: list[float], devices: int, tmp_path: Path
) -> None:
    logs = [LinesLogger(tmp_path / name) for name in ("one", "many")]
    options: dict[str, Any] = {"train_size": 112, "validation_size": 0, "partition": fractions}
    together = Together(batch_size=37, test_size=100, **options)
    together.setup()
    right = fit(distillation(), together, 1, logger=logs[0], **STEPS)
    found = fit(distillation(), digits(**options), devices, strategy=strategy(timeout=60), logger=logs[1], **STEPS)
    assert_same(weights(found), weights(right), atol=1e-9)
    one, many = (log.values("hint/train/loss") for log in logs)
    assert many == pytest.approx(one, abs=1e-9, rel=0)
    assert len(one) == 20


@pytest.mark.parametrize(
    ("fractions", "atol"), [([0.8, 0.2], 0.0), pytest.param(FRACTIONS, 1e-12, marks=pytest.mark.slow)]
)  # gloo adds two in one order
def test_a_run_resumed_in_mid_epoch_ends_as_if_undisturbed(fractions: list[float], atol: float, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"

    def ended(**options: Any) -> dict[str, Tensor]:
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        module = distillation(["ce", "hint"])
        with quiet():
            made = trainer(len(fractions), strategy=DDP(timeout=60), **STEPS | {"max_steps": 10} | options)
            made.fit(module, digits(partition=fractions), **resumed)
        return weights(module)

    right = ended()
    ended(callbacks=[SaveAndStop(path, 4)])
    assert_same(ended(), right, atol=atol)


COMMANDS = {
    "too few": (["--trainer.devices", "4"], "expected 3 fractions"),
    "one device": ([], "expected none on one device"),
    "exact": (["--trainer.devices", "3", "--exact", "4"], "not allowed with --exact"),
    "a server has no share": (["--trainer.devices", "3", "--trainer.strategy", "param_server"], "expected 2 fractions"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_partition_that_misfits_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, expected = COMMANDS[case]
    expected = expected.replace("3 fractions", "4 fractions, one for each device that trains")
    shares = ["--data.partition", "[0.7,0.2,0.1]", "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit) as ended:
        kd.main(["--out", str(tmp_path / "out"), *shares, *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --data.partition [0.7, 0.2, 0.1]: {expected}")


def test_the_comparison_of_strategies_takes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hardware.main(["--data.partition", "[0.5,0.5]", "--trainer.devices", "2", "--out", str(tmp_path / "out")])
    assert "--data.partition [0.5, 0.5]: expected none on one device" in capsys.readouterr().err


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


@pytest.mark.parametrize("by", ["seed", "split"])
def test_known_samples_are_balanced_and_nested_and_a_seed_draws_its_own(by: Any) -> None:
    few, more = (digits(labelled=n, labelled_by=by) for n in (23, 60))
    assert known(few) < known(more)
    counts = few.split("train").labels[sorted(known(few))].bincount()
    assert sorted(counts.tolist()) == [2] * 7 + [3] * 3
    again, other = digits(labelled=23, labelled_by=by, batch_size=5), digits(labelled=23, labelled_by=by, seed=1)
    assert known(again) == known(few) != known(other)
    again.order_seed, before = 5, known(few)
    assert (known(again) == before) is (by == "split")
    again.order_seed = 0  # a data module is shared by the seeds of a run
    assert known(again) == before
    assert again.fingerprint() == few.fingerprint()  # so that a run grows by seeds


def test_a_draw_by_the_split_is_the_same_as_ever() -> None:
    drawn = digits(labelled=23, labelled_by="split").labelled_samples()
    assert drawn is not None
    labels = digits().split("train").labels
    assert drawn.nonzero().flatten().equal(splits.balanced_subset(labels, 23, keyed.fold_in(0, 6)))


def test_what_can_not_draw_labels_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^data.labelled_by seeds: expected seed or split"):
        digits(labelled=23, labelled_by="seeds")
    with pytest.raises(BadInput, match=r"^data.labelled_by split: expected `data.labelled N` beside it"):
        digits(labelled_by="split")


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


@pytest.mark.parametrize("labelled", [-1, 0, 9, 102])
def test_a_number_that_no_training_set_has_is_refused(labelled: int) -> None:
    with pytest.raises(BadInput, match=rf"^data.labelled {labelled}: expected 10 to 101: "):
        digits(labelled=labelled)
