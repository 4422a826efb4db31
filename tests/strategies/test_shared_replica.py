"""Ranks that read whole batches read the same ones, in the order of the user's own loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lab.strategies import RPCHybrid
from strategies.base.data_parallel import DataParallel
from tests.grids import mostly_slow
from tests.pipelines import Plain, ended, pairs, pipeline
from tests.training import LinesLogger, assert_same

STRATEGIES: dict[str, Callable[[], DataParallel]] = {
    "pipeline": lambda: pipeline(num_microbatches=3),
    "rpc_hybrid": lambda: RPCHybrid(timeout=60),
}


class Seeds(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.manual_seed(trainer.global_rank)


@pytest.mark.parametrize("shuffle", mostly_slow([False, True], True))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_come_in_the_order_of_the_users_own_loader(strategy: str, shuffle: bool) -> None:
    one, both = (
        ended(Plain, made, lambda: DataLoader(pairs(), batch_size=8, shuffle=shuffle), callbacks=[Seeds()])[0]
        for made in (None, STRATEGIES[strategy]())
    )
    assert_same(one, both, atol=1e-9)


class Mixed(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return pairs()[int(torch.randint(37, ()))]


class Noisy(Plain):
    """Its first stage draws noise and its last none; logs how far apart the ranks' batches are."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))

    def training_step(self, batch: Any) -> torch.Tensor:
        own = batch[0].sum().item()
        self.log("apart", abs(own - self.of_rank_one(own)))
        return super().training_step(batch)

    def of_rank_one(self, own: float) -> float:
        return self.trainer.strategy.broadcast(own, src=1)


@pytest.mark.filterwarnings("ignore:net.1. noise from torch's generator")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_layers_draw_does_not_part_the_ranks_batches(strategy: str, tmp_path: Path) -> None:
    logger = LinesLogger(tmp_path / "lines")
    mixed = DataLoader(Mixed(), batch_size=8)
    ended(Noisy, STRATEGIES[strategy](), lambda: mixed, max_epochs=1, logger=logger, log_every_n_steps=1)
    assert logger.values("apart") == [0.0] * 8
