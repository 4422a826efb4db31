"""What a stranger's module logs under `exact` has the names and the values that Lightning gives on one device."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassHammingDistance

from harness.runs.quiet import quiet
from strategies import DDP
from tests.callbacks import Notes
from tests.training import LinesLogger, trainer

N = 4  # shards; the last batch of 3 rows leaves one empty, which is all that the third of three ranks has


class Talker(LightningModule):
    """Logs in all ways that `LightningModule.log` has, values that are sums, extremes or means over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.accuracies = nn.ModuleList(MulticlassAccuracy(2, average="micro") for _ in range(3))
        kinds = {"right": MulticlassAccuracy, "wrong": MulticlassHammingDistance}
        self.metrics = MetricCollection({name: kind(2, average="micro") for name, kind in kinds.items()})

    def say(self, batch: Any, metric: int, **levels: bool) -> Tensor:
        x, y = batch
        logits = self.net(x)
        losses, kept = F.cross_entropy(logits, y, reduction="none"), y == 1
        self.log("loss", losses.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("usual", losses.mean())
        self.log("rows", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("total", losses.sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        self.log("highest", losses.max(), reduce_fx="max", on_epoch=True)
        self.log("lowest", losses.min(), reduce_fx=min, sync_dist=True, **levels)
        self.log("kept", losses[kept].mean(), batch_size=int(kept.sum()), on_epoch=True)
        self.log_dict({"norm": logits.norm(dim=1).mean(), "tenth": 0.1}, prog_bar=True, logger=False)
        self.log("alone", losses.mean(), rank_zero_only=True, **levels)
        self.accuracies[metric](logits, y)
        self.log("accuracy", self.accuracies[metric], on_step=True, on_epoch=True)
        return losses.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metrics(self.net(batch[0]), batch[1])
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        if batch_idx == 1:
            self.log("second", batch[0].mean())
        return self.say(batch, 2)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.say(batch, dataloader_idx, on_step=True, on_epoch=False)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.say(batch, 0)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("seen_by_hook", self.trainer.callback_metrics["kept/dataloader_idx_1"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def known(trainer: Any, _module: Any) -> list[dict[str, float]]:
    metrics = trainer.logged_metrics, trainer.callback_metrics, trainer.progress_bar_metrics
    return [{name: float(value) for name, value in found.items()} for found in metrics]


# Whenever Lightning has brought them up to date
UPDATED = ("on_train_batch_start", "on_validation_epoch_end", "on_validation_end", "on_train_end", "on_test_end")


def loader(rows: int, batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(rows) % 2), batch_size)


def told(folder: Path, devices: int, exact: int | None, run: Callable[[Trainer], Any]) -> tuple[Any, ...]:
    folder.mkdir()
    logger, strategy = LinesLogger(folder / "lines"), DDP(timeout=60, exact=exact) if exact else "auto"
    options = {"strategy": strategy, "logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 1}
    options["use_distributed_sampler"] = False  # Lightning's shuffles, where there is a strategy for several devices
    notes = Notes(folder / "ranks", known, *UPDATED)
    made = trainer(devices, precision="64-true", callbacks=[notes], **options)
    with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        found = run(made)
    assert len(notes.of_ranks()) == devices
    return [json.loads(line) for line in logger.path.read_text().splitlines()], notes.of_ranks(), found


def assert_alike(found: Any, expected: Any) -> None:
    """The same names in the same order, and values that are equal up to float64's rounding."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)


def fitted(made: Trainer) -> None:
    made.fit(Talker(), loader(13, 5), [loader(7, 2), loader(5, 3)])


def validated(made: Trainer) -> Any:
    return made.validate(Talker(), [loader(7, 2), loader(2, 2)], verbose=False)


def scored(made: Trainer) -> Any:
    return made.test(Talker(), loader(7, 2), verbose=False)


@pytest.mark.parametrize("run", [fitted, validated, scored])
def test_names_and_values_are_those_of_lightning_on_one_device(run: Callable[[Trainer], Any], tmp_path: Path) -> None:
    plain = told(tmp_path / "plain", 1, None, run)
    names = {name for line in plain[0] for name in line}
    expected = {fitted: "second", validated: "loss_epoch/dataloader_idx_1", scored: "highest"}
    assert {expected[run], "epoch", "step"} <= names
    for devices in {fitted: (1, 3), validated: (1, 2), scored: (2,)}[run]:
        lines, ranks, found = told(tmp_path / str(devices), devices, N, run)
        assert_alike(lines, plain[0])
        for known in ranks:
            assert_alike(known, plain[1][0])
            assert known == ranks[0]
        if run is not fitted:
            assert_alike(found, plain[2])
