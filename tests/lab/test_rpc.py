"""What the strategies over RPC share: where ranks meet, checkpoints, statistics, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import rpc
from torch.multiprocessing import ProcessRaisedException

from harness.runs.quiet import quiet
from lab.strategies import ParamServer, RPCHybrid
from lit_modules.classifier import LitClassifier
from strategies import DataParallel, ZeRO1
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.lab.test_param_server import Plain, pairs
from tests.lab.test_ring_training import AtValidation, statistics
from tests.launching import free_port
from tests.strategies.test_strategies import STEPS
from tests.training import assert_same, classifier, digits, distillation, fit, net, trainer, weights

BOTH = pytest.mark.parametrize("strategy", [ParamServer, RPCHybrid])
Chain = list[tuple[Callable[..., DataParallel], int]]
CHAINS: dict[str, Chain] = {
    "param_server": [(ParamServer, 3), (ZeRO1, 2), (ParamServer, 2), (ParamServer, 1)],
    "rpc_hybrid": [(RPCHybrid, 3), (ZeRO1, 2), (RPCHybrid, 2), (ParamServer, 2)],
}


@BOTH
@pytest.mark.parametrize("method", mostly_slow(["file", "tcp"], "file"))
def test_ranks_may_meet_anywhere(strategy: Any, method: str, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meeting" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    ended = [
        weights(fit(classifier(), digits(), 2, strategy=strategy(timeout=60, init_method=name), max_steps=3))
        for name in (None, where)
    ]
    assert_same(*ended, atol=0)


@pytest.mark.parametrize("chain", mostly_slow(CHAINS, "param_server"))
def test_a_run_goes_on_under_another_strategy_and_number_of_devices(chain: str, tmp_path: Path) -> None:
    right = weights(fit(distillation(["ce", "hint"]), digits(), 1, **STEPS | {"max_steps": 16}))
    path = tmp_path / "saved.ckpt"
    for part, (strategy, devices) in enumerate(CHAINS[chain], 1):
        module = distillation(["ce", "hint"])
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        options = STEPS | {"callbacks": [SaveAndStop(path, 4 * part)], "strategy": strategy(timeout=60)}
        with quiet():
            trainer(devices, **options | {"max_steps": 16}).fit(module, digits(), **resumed)
    assert_same(weights(module), right, atol=1e-9)


class Normalised(LightningModule):
    """Its BatchNorm keeps statistics of what a rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(self.norm(images.flatten(1).to(self.layer.weight.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch.inputs).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch.inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@BOTH
@pytest.mark.filterwarnings("ignore:norm. BatchNorm sees the rows of one worker")
def test_all_ranks_validate_with_one_ranks_statistics(strategy: Any, tmp_path: Path) -> None:
    told = AtValidation(tmp_path / "statistics", statistics)
    data = digits(train_size=112, validation_size=20, batch_size=28)
    fit(Normalised(), data, 3, strategy=strategy(timeout=60), max_epochs=2, callbacks=[told])
    first, second = told.lines()
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


# What is refused


class Manual(Plain):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@BOTH
def test_modules_that_step_by_themselves_a_loss_scale_and_lbfgs(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = strategy.rpc_name
    with quiet(), pytest.raises(ValueError, match=f"strategy {name}: expected automatic optimization of Manual"):
        trainer(2, strategy=strategy(timeout=60)).fit(Manual(), pairs())
    made = trainer(2, strategy=strategy(timeout=60))
    monkeypatch.setattr(made.precision_plugin, "scaler", torch.amp.GradScaler("cpu"), raising=False)
    with quiet(), pytest.raises(ValueError, match="precision 16-mixed: expected one without a loss scale"):
        made.fit(Plain(), pairs())
    with quiet(), pytest.raises(ProcessRaisedException, match=f"{name}: expected an optimizer other than LBFGS"):
        fit(LitClassifier(net(), optimizer=torch.optim.LBFGS), digits(), 2, strategy=strategy(timeout=60))


@BOTH
def test_a_platform_without_rpc_is_told_before_anything_starts(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"strategy {strategy.rpc_name}: expected a torch with"):
        trainer(2, strategy=strategy(timeout=60))
