"""A master that drives workers by RPC gets the numbers of one process, whatever is in a worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from apprentice.keyed import with_seed
from harness.runs.quiet import quiet
from lab.strategies import ParamServer, RPCHybrid
from lit_modules.classifier import LitClassifier
from lit_modules.nets import LightNN
from tests.lab.test_param_server import At, Plain, killed, pairs, start
from tests.processes import launch
from tests.training import LinesLogger, assert_same, classifier, digits, fit, trainer, weights

SPLIT = {"devices_per_worker": 2}


def hybrid(**options: Any) -> RPCHybrid:
    return RPCHybrid(timeout=60, **options)


class Twice(Plain):
    """Anyone's module: calls `forward` twice, has a parameter outside of it, groups, a schedule and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].to(self.dtype) / 16
        outputs = self(x) + self(x.flip(-1)) * self.scale
        loss = F.cross_entropy(outputs, batch[1]) + 0.1 * self.net[1].weight.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net.parameters()}, {"params": [self.scale], "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
        schedule = {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0), "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def test_anyones_module_trains_by_its_forward(tmp_path: Path) -> None:
    """The plain mean of a batch, not a sum of parts: what is remote is forward alone."""
    outcomes = {}
    for devices in (1, 3):
        module, logger = with_seed(0, Twice), LinesLogger(tmp_path / str(devices))
        strategy = hybrid() if devices > 1 else "auto"
        options: dict[str, Any] = {"strategy": strategy, "logger": logger, "log_every_n_steps": 1}
        with quiet():
            trainer(devices, precision="64-true", max_epochs=4, **options).fit(module, pairs(60))
        outcomes[devices] = weights(module), logger.values("loss")
    assert_same(outcomes[1][0], outcomes[3][0], atol=1e-9)
    assert outcomes[1][1] == pytest.approx(outcomes[3][1], abs=1e-9, rel=0)


class Dtypes(Callback):
    """Writes the type of what the last layer gives."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def told(_layer: Any, _inputs: Any, output: torch.Tensor) -> None:
            (self.path / str(trainer.global_rank)).write_text(str(output.dtype))

        pl_module.net.classifier[-1].register_forward_hook(told)


def test_workers_compute_in_the_precision_that_was_asked_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 1, "callbacks": [Dtypes(tmp_path)]}
    fit(classifier(), digits(), 3, strategy=hybrid(), **options)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("12", "torch.bfloat16")


class Failing(LightNN):
    """Does something in a forward on one rank, in training."""

    def __init__(self, rank: int, does: Callable[[], Any]) -> None:
        super().__init__(input_shape=(1, 8, 8))
        self.rank, self.does, self.calls = rank, does, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == self.rank:
            self.does()
        return super().forward(x)


def bug() -> None:
    raise LookupError("a bug in forward")


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("does", [bug, killed])
def test_a_worker_that_fails_in_mid_step_ends_the_run(does: Callable[[], Any], rank: int, tmp_path: Path) -> None:
    run = start(RPCHybrid(timeout=100), tmp_path / "log", lambda: LitClassifier(Failing(rank, does)))
    assert run.wait(30) != 0
    if does is killed:
        errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert f"rank {rank} was killed by SIGKILL" in errors[0]
    else:
        assert run.output.strip().splitlines()[-1] in {
            f"RuntimeError: rank {rank}: LookupError: a bug in forward", "LookupError: a bug in forward",
        }  # fmt: skip


def test_a_master_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    run = start(RPCHybrid(timeout=100), tmp_path / "log", callbacks=[At(0, killed)])
    assert run.wait(30) == 2
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "rank 0 was killed by SIGKILL" in line


def two_fits(rank: int, path: Path) -> None:
    for strategy in (hybrid(), ParamServer(timeout=60), hybrid()):
        module = classifier()
        with quiet():
            trainer(2, strategy=strategy, precision="64-true").fit(module, digits())
    torch.save(weights(module), path / f"{rank}.pt")


def test_ranks_that_torchrun_started_fit_more_than_once(tmp_path: Path) -> None:
    for run in launch(two_fits, tmp_path):
        assert run.wait() == 0, run.output
    right = weights(fit(classifier(), digits(), 1, precision="64-true"))
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), right, atol=1e-9)


class Elsewhere(Plain):
    """Trains without its `forward`."""


class OwnBackward(Plain):
    """Has a backward of its own."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def test_modules_that_can_not_be_trained_so_are_refused() -> None:
    with quiet(), pytest.raises(ValueError, match="expected Lightning's backward of OwnB"):
        trainer(2, strategy=hybrid()).fit(OwnBackward(), pairs())
    with quiet(), pytest.raises(ValueError, match="devices_per_worker 2: expected a module with pipeline_stages; Plai"):
        trainer(2, strategy=hybrid(**SPLIT)).fit(Plain(), pairs())
    with quiet(), pytest.raises(ValueError, match="devices_per_worker 90: expected at most the"):
        trainer(2, strategy=hybrid(devices_per_worker=90)).fit(classifier(), digits())
    with quiet(), pytest.raises(ProcessRaisedException, match="training_step: expected a call of forward"):
        trainer(2, strategy=hybrid()).fit(Elsewhere(), pairs())


def test_options_that_can_not_work_are_refused() -> None:
    with quiet(), pytest.raises(ValueError, match=r"devices_per_worker \[1, 2\]: expected a number for each"):
        trainer(2, strategy=hybrid(devices_per_worker=[1, 2])).fit(classifier(), digits())
    with pytest.raises(ValueError, match="devices_per_worker 0: expected at least 1"):
        RPCHybrid(devices_per_worker=0)
