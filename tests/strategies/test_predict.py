"""Predictions: each row comes out once over all ranks, so that files that ranks write can be joined."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from harness.runs.quiet import quiet
from lab.strategies import RPCHybrid
from strategies import DDP, PipelineStrategy
from tests.grids import mostly_slow
from tests.pipelines import Plain, pairs
from tests.training import trainer

ROWS, BATCH = 23, 4  # six batches, the last of three rows


class Writer(BasePredictionWriter):
    """One file a rank of what is predicted by the batch, and one of the epoch; each row with its place in the set."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder
        self.batches: list[Any] = []

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Tensor, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        torch.testing.assert_close(batch[0], pairs(ROWS).tensors[0][indices])
        self.batches.append((loader, list(indices), prediction))

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, indices: Any) -> None:
        predictions = [predictions] if len(indices) == 1 else predictions
        epoch = [
            (loader, list(rows), prediction)
            for loader, found in enumerate(zip(indices, predictions, strict=True))
            for rows, prediction in zip(*found, strict=True)
        ]
        torch.save((self.batches, epoch), self.folder / f"rank{trainer.global_rank}.pt")


def joined(folder: Path, interval: int) -> dict[tuple[int, int], Tensor]:
    """By loader and place in the set, what all ranks have written; fails where a row is there twice."""
    found: dict[tuple[int, int], Tensor] = {}
    for path in folder.glob("rank*.pt"):
        for loader, rows, prediction in torch.load(path)[interval]:
            for row, values in zip(rows, prediction, strict=True):
                assert (loader, row) not in found
                found[loader, row] = values
    return dict(sorted(found.items()))


def predicted(folder: Path, devices: int, strategy: Any, loaders: int = 1, **kwargs: Any) -> dict[Any, Tensor]:
    folder.mkdir()
    made = trainer(devices, strategy=strategy, precision="64-true", callbacks=[Writer(folder)], **kwargs)
    data = [DataLoader(TensorDataset(*pairs(ROWS).tensors), BATCH) for _ in range(loaders)]
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # Lightning's, about workers
        made.predict(Several() if loaders > 1 else Plain(), data, return_predictions=False)
    assert len(list(folder.glob("rank*.pt"))) == devices
    by_batch, by_epoch = joined(folder, 0), joined(folder, 1)
    assert all(torch.equal(by_batch[key], by_epoch[key]) for key in by_batch | by_epoch)
    return by_batch


class Several(Plain):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return self(batch[0])


CASES: dict[str, tuple[int, Any]] = {
    "exact-1": (1, lambda: DDP(timeout=60, exact=8)),
    "exact-2": (2, lambda: DDP(timeout=60, exact=8)),
    "exact-3": (3, lambda: DDP(timeout=60, exact=8)),
    "ddp": (2, lambda: DDP(timeout=60)),
    "pipeline": (2, lambda: PipelineStrategy(timeout=60)),
    "pipeline-exact": (2, lambda: PipelineStrategy(timeout=60, exact=8)),
    "pipeline-2x2": (4, lambda: PipelineStrategy(timeout=60, data_parallel_size=2)),
    "pipeline-2x2-exact": (4, lambda: PipelineStrategy(timeout=60, data_parallel_size=2, exact=8)),
    "rpc_hybrid": (3, lambda: RPCHybrid(timeout=60)),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "exact-3", "ddp", "pipeline-2x2", "rpc_hybrid"))
def test_each_row_is_predicted_once(case: str, tmp_path: Path) -> None:
    devices, strategy = CASES[case]
    alone = predicted(tmp_path / "alone", 1, "auto")
    found = predicted(tmp_path / "found", devices, strategy())
    assert list(found) == list(alone) == [(0, row) for row in range(ROWS)]
    for key, values in alone.items():
        torch.testing.assert_close(found[key], values, rtol=0, atol=0 if "exact" in case else 1e-12)


def test_loaders_and_a_limit_under_exact(tmp_path: Path) -> None:
    options = {"loaders": 2, "limit_predict_batches": 3}
    one, two = (predicted(tmp_path / str(n), n, DDP(timeout=60, exact=8), **options) for n in (1, 2))
    assert list(one) == list(two) == [(loader, row) for loader in range(2) for row in range(3 * BATCH)]
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_one_device_returns_all() -> None:
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # Lightning's, about workers
        made = trainer(1, strategy=DDP(exact=8), precision="64-true")
        found = made.predict(Plain(), DataLoader(pairs(ROWS), BATCH))
    assert [len(rows) for rows in found] == [4, 4, 4, 4, 4, 3]
