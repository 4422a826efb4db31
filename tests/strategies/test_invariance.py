"""The number of devices changes the speed, not the result; each row is predicted once."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from apprentice.batch import Batch
from harness.runs.quiet import quiet
from lit_modules.nets import DeepNN
from strategies import DDP, PipelineStrategy
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.pipelines import Plain, pairs
from tests.strangers import Writer, joined
from tests.training import (
    MODULES,
    TAGS,
    LinesLogger,
    assert_agree,
    assert_same,
    classifier,
    digits,
    distillation,
    fit,
    on,
    outcome,
    trainer,
    weights,
)

DEVICES = (3, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "others"), [("students", DEVICES), ("teacher", (2,)), ("resnet8", (3,))])
def test_fifty_float64_steps_agree(run: str, others: tuple[int, ...], tmp_path: Path) -> None:
    options = {"max_epochs": -1, "max_steps": 50, "precision": "64-true"}
    one, *several = (outcome(MODULES[run](), digits(), tmp_path, [TAGS[run]], n, **options) for n in (1, *others))
    assert len(one[0]) == 50
    assert all(w.dtype == torch.float64 for w in one[1].values() if w.is_floating_point())
    for other in several:
        assert_agree(one, other)


def test_first_float32_losses_agree(tmp_path: Path) -> None:
    options = {"max_epochs": -1, "max_steps": 10}
    one, *others = (
        outcome(classifier(DeepNN), digits(), tmp_path, ["train/loss"], n, **options)[0] for n in (1, *DEVICES)
    )
    assert len(one) == 10
    for other in others:
        assert other[:4] == pytest.approx(one[:4], abs=1e-5, rel=0)
        assert other == pytest.approx(one, rel=0.01)  # some processors' kernels round so that training amplifies it


def test_one_checkpoint_evaluates_to_the_same_counts() -> None:
    module, data = fit(distillation(), digits(train_size=300), max_epochs=3), digits(test_size=None, batch_size=50)
    found = []
    for devices in (1, *DEVICES):
        with quiet():  # in float64, as in float32 the size of a batch may decide between nearly equal logits
            scores = trainer(devices, precision="64-true").test(module, data, verbose=False)[0]
        found.append({k: v for k, v in scores.items() if k.endswith("correct")})
    assert all(counts == found[0] for counts in found)
    assert 0 < found[0]["ce/test/correct"] < data.sizes["test"]


def test_plain_pairs_from_a_stock_loader_are_shares_of_one_batch(tmp_path: Path) -> None:
    train = digits(train_size=96).split("train")
    images, labels = train.inputs.double() / 16, train.labels
    curves = []
    for devices, batch_size in ((1, 96), (2, 48)):  # all images in each batch: Lightning's sampler shuffles them
        loader = DataLoader(TensorDataset(images, labels), batch_size=batch_size)
        logger = LinesLogger(tmp_path / str(devices))
        options = {"precision": "64-true", "max_epochs": 3, "limit_val_batches": 0, "logger": logger}
        with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers and the missing validation
            trainer(devices, log_every_n_steps=1, **options).fit(classifier(dropout=0.0), loader)
        curves.append(logger.values("train/loss") + logger.values("train/acc"))
    assert len(curves[0]) == 6
    assert curves[0] == pytest.approx(curves[1], abs=1e-9, rel=0)


class Pairs(Dataset):
    """Six batches alike, plain pairs or batches with their numbers, so that only noise tells one from another."""

    def __init__(self, numbered: bool) -> None:
        train = digits().split("train")
        self.pair = train.inputs[:8].float() / 16, train.labels[:8]
        self.numbered, self.count = numbered, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = torch.arange(8)
        self.count += 1
        return Batch(*self.pair, rows, rows, 8, 1, self.count - 1) if self.numbered else self.pair


def accumulated(numbered: bool, *callbacks: Callback, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after two epochs of pairs, two batches a step."""
    module, resumed = classifier(dropout=0.5), {"ckpt_path": options.pop("resumed", None)}
    options |= {"accumulate_grad_batches": 2, "limit_val_batches": 0, "callbacks": list(callbacks)}
    with (
        quiet(),
        warnings.catch_warnings(action="ignore"),
    ):  # Lightning's, about workers, the missing validation and the resume
        loader = DataLoader(Pairs(numbered), batch_size=None)
        trainer(use_distributed_sampler=False, **options).fit(module, loader, **resumed)
    return weights(module)


@pytest.mark.parametrize(
    "place", mostly_slow(["auto 1", "ddp 1 exact 4", "ddp 2 exact 4", "pipeline 2"], "auto 1", "ddp 2 exact 4")
)
def test_each_batch_that_a_step_accumulates_has_its_own_noise(place: str) -> None:
    plain, numbered = (accumulated(kind, **on(place)) for kind in (False, True))
    assert_same(plain, numbered)
    assert_same(plain, accumulated(False), atol=1e-5)


def test_plain_pairs_draw_their_noise_after_a_resume_in_mid_epoch(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped.ckpt"
    accumulated(False, SaveAndStop(stopped, 4))  # of three steps an epoch: in the second
    assert_same(accumulated(False, resumed=stopped), accumulated(False))


ROWS, BATCH = 23, 4  # six batches, the last of three rows


def predicted(folder: Path, loaders: int = 1, **options: Any) -> dict[Any, Tensor]:
    folder.mkdir()
    made = trainer(precision="64-true", callbacks=[Writer(folder, pairs(ROWS).tensors[0])], **options)
    data = [DataLoader(TensorDataset(*pairs(ROWS).tensors), BATCH) for _ in range(loaders)]
    with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        made.predict(Several() if loaders > 1 else Plain(), data, return_predictions=False)
    assert len(list(folder.glob("rank*.pt"))) == made.world_size
    by_batch, by_epoch = joined(folder, 0), joined(folder, 1)
    assert all(torch.equal(by_batch[key], by_epoch[key]) for key in by_batch | by_epoch)
    return by_batch


class Several(Plain):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return self(batch[0])


CASES = [
    "ddp 1 exact 8", "ddp 3 exact 8", "ddp 2", "pipeline 2 exact 8", "pipeline 4 in two", "pipeline 4 in two exact 8",
    "param_server 3",
]  # fmt: skip


@pytest.mark.parametrize("case", mostly_slow(CASES, "ddp 3 exact 8", "ddp 2", "pipeline 4 in two", "param_server 3"))
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
    with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        made = trainer(1, strategy=DDP(exact=8), precision="64-true")
        found = made.predict(Plain(), DataLoader(pairs(ROWS), BATCH))
    assert [len(rows) for rows in found] == [4, 4, 4, 4, 4, 3]
