"""Data on a GPU: noise and augmentation have the CPU's bits, and a set in memory is copied there once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from apprentice import keyed
from tests.gpus import on_gpu
from tests.training import classifier, digits, fit

pytestmark = pytest.mark.gpu


def same_bits() -> None:
    rows, data = torch.arange(50), digits(augment=True)
    images = data.split("train").take(rows).inputs
    for draw in (lambda x: keyed.bits(7, x, 33), lambda x: data.augmentation(images.to(x.device), 2, x)):
        assert torch.equal(draw(rows.cuda()).cpu(), draw(rows))


class Places(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        found = {x.device.type for x in (*batch[:4], *data._moved["train", trainer.strategy.root_device])}
        assert found == {"cuda"}
        self.addresses = {*getattr(self, "addresses", ()), data._on_device("train").inputs.data_ptr()}


def is_copied_once() -> None:
    places = Places()
    fit(classifier(), digits(augment=True, mixup=0.2), accelerator="gpu", callbacks=[places])
    assert len(places.addresses) == 1


@pytest.mark.parametrize("function", [same_bits, is_copied_once])
def test_data(function: Any, tmp_path: Path) -> None:
    on_gpu(tmp_path, function)
