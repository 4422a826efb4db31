"""Fixed shares of the data: whose samples are whose never changes, and an update is still the mean over its batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.batch import Batch
from apprentice.errors import BadInput
from datamodules import Digits
from datamodules.loaders import EpochOrder, PartitionedOrder, TrainLoader
from experiments import hardware, kd
from harness.runs.quiet import quiet
from lab.strategies import ParamServer
from strategies import DDP, DataParallel
from tests.callbacks import SaveAndStop
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
def test_float64_agrees_with_one_process_on_the_same_batches(
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
def test_a_run_that_is_resumed_in_mid_epoch_ends_as_if_undisturbed(
    fractions: list[float], atol: float, tmp_path: Path
) -> None:
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


REFUSED = {
    "a sum that is not 1": ([0.7, 0.2], "data.partition [0.7, 0.2]: expected fractions of at least 0 that add up to"),
    "negative": ([1.5, -0.5], "data.partition [1.5, -0.5]: expected fractions of at least 0"),
    "not a number": ([float("nan"), 1.0], "data.partition [nan, 1.0]: expected fractions"),
    "nothing": ([], "data.partition []: expected fractions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fractions_that_are_none_are_refused(case: str) -> None:
    fractions, message = REFUSED[case]
    with pytest.raises(BadInput) as refused:
        Digits(partition=fractions)
    assert str(refused.value).startswith(message)


COMMANDS = {
    "too few": (["--trainer.devices", "4"], "3 fractions"),
    "one device": ([], "none on one device"),
    "exact": (["--trainer.devices", "3", "--exact", "4"], "none with --exact"),
    "a server has no share": (["--trainer.devices", "3", "--trainer.strategy", "param_server"], "2 fractions"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_partition_that_does_not_fit_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, expected = COMMANDS[case]
    expected = expected.replace("3 fractions", "4 fractions, one for each device that trains")
    shares = ["--data.partition", "[0.7,0.2,0.1]", "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit) as ended:
        kd.main(["--out", str(tmp_path / "out"), *shares, *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --data.partition [0.7, 0.2, 0.1]: expected {expected}")


def test_the_comparison_of_strategies_takes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hardware.main(["--data.partition", "[0.5,0.5]", "--trainer.devices", "2", "--out", str(tmp_path / "out")])
    assert "--data.partition [0.5, 0.5]: expected none on one device" in capsys.readouterr().err
