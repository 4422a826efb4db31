"""Predictions: each row comes out once over all ranks, so that files that ranks write can be joined."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from harness.runs.quiet import quiet
from strategies import DDP, PipelineStrategy
from tests.grids import mostly_slow
from tests.pipelines import Plain, pairs
from tests.strangers import Writer, joined
from tests.training import on, trainer

ROWS, BATCH = 23, 4  # six batches, the last of three rows


def predicted(folder: Path, loaders: int = 1, **options: Any) -> dict[Any, Tensor]:
    folder.mkdir()
    made = trainer(precision="64-true", callbacks=[Writer(folder, pairs(ROWS).tensors[0])], **options)
    data = [DataLoader(TensorDataset(*pairs(ROWS).tensors), BATCH) for _ in range(loaders)]
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # Lightning's, about workers
        made.predict(Several() if loaders > 1 else Plain(), data, return_predictions=False)
    assert len(list(folder.glob("rank*.pt"))) == made.world_size
    by_batch, by_epoch = joined(folder, 0), joined(folder, 1)
    assert all(torch.equal(by_batch[key], by_epoch[key]) for key in by_batch | by_epoch)
    return by_batch


class Several(Plain):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return self(batch[0])


CASES = [
    *(f"ddp {n} exact 8" for n in (1, 2, 3)), "ddp 2", "pipeline 2", "pipeline 2 exact 8", "pipeline 4 in two",
    "pipeline 4 in two exact 8", "rpc_hybrid 3",
]  # fmt: skip


@pytest.mark.parametrize("case", mostly_slow(CASES, "ddp 3 exact 8", "ddp 2", "pipeline 4 in two", "rpc_hybrid 3"))
def test_each_row_is_predicted_once(case: str, tmp_path: Path) -> None:
    options = on(case.replace(" in two", ""))
    if "in two" in case:
        exact = 8 if "exact" in case else None
        options["strategy"] = PipelineStrategy(timeout=60, data_parallel_size=2, exact=exact)
    alone, found = predicted(tmp_path / "alone"), predicted(tmp_path / "found", **options)
    assert list(found) == list(alone) == [(0, row) for row in range(ROWS)]
    for key, values in alone.items():
        torch.testing.assert_close(found[key], values, rtol=0, atol=0 if "exact" in case else 1e-12)


def test_loaders_and_a_limit_under_exact(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loaders": 2, "limit_predict_batches": 3}
    one, two = (predicted(tmp_path / str(n), **on(f"ddp {n} exact 8"), **options) for n in (1, 2))
    assert list(one) == list(two) == [(loader, row) for loader in range(2) for row in range(3 * BATCH)]
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_one_device_returns_all() -> None:
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # Lightning's, about workers
        made = trainer(1, strategy=DDP(exact=8), precision="64-true")
        found = made.predict(Plain(), DataLoader(pairs(ROWS), BATCH))
    assert [len(rows) for rows in found] == [4, 4, 4, 4, 4, 3]
