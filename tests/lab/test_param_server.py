"""A parameter server gives the numbers of one process, over RPC; it refuses what it can't do, and ends with reasons."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed import rpc
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F

from apprentice.keyed import with_seed
from harness import cli
from harness.runs.quiet import quiet
from lab.strategies import ParamServer
from lit_modules.classifier import LitClassifier
from strategies import DDP, DataParallel, ZeRO1
from tests.callbacks import Notes, SaveAndStop
from tests.grids import mostly_slow
from tests.lab.test_ring_training import CLIPPED, Normalised, statistics
from tests.launching import free_port
from tests.processes import Run, launch
from tests.strategies.test_strategies import STEPS, alone, norm, state_bytes, trained
from tests.training import (
    assert_agree,
    assert_same,
    classifier,
    digits,
    distillation,
    fit,
    net,
    outcome,
    trainer,
    weights,
)


def server(**options: Any) -> ParamServer:
    return ParamServer(timeout=60, **options)


class Plain(LightningModule):
    """Anyone's module: its loss is a mean over whatever rows it gets, and nothing in it talks to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0].to(self.dtype) / 16), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def pairs() -> Any:
    split = digits().split("train")
    data = torch.utils.data.TensorDataset(split.inputs[:64], split.labels[:64])
    return torch.utils.data.DataLoader(data, 8, shuffle=False)


@pytest.mark.parametrize(
    ("run", "devices", "options"),
    [("students", 1, {}), ("resnet8", 3, {}), *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("students", 2, CLIPPED), ("students", 3, {}), ("students", 8, {}), ("teacher", 3, CLIPPED)]
    )],
)  # fmt: skip
def test_float64_agrees_with_one_process(run: str, devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    right = alone(run, "accumulated and clipped" if options else "plain")
    assert len(right[0]) == 20
    assert_agree(right, trained(run, f"auto {devices}", tmp_path, strategy=server(), **options))


def test_each_sample_is_validated_once_and_replicas_stay_equal(tmp_path: Path) -> None:
    norms, scores = Notes(tmp_path / "norms", norm, "on_train_batch_end"), {}
    for devices, callbacks in {1: [], 3: [norms]}.items():
        options = {**STEPS, "max_steps": 6, "callbacks": callbacks, "strategy": server()}
        scores[devices], _ = outcome(
            classifier(), digits(validation_size=50), tmp_path, ["val/acc"], devices, **options
        )
    assert scores[1] == scores[3] != []
    first, *others = norms.of_ranks()
    assert len(first) == 6
    assert others == [first] * 2


def test_anyones_module_trains_as_under_ddp_on_the_workers_alone() -> None:
    """Lightning's sampler gives two ranks of `ddp`, and two workers beside a server, the same batches."""

    def ended(strategy: DataParallel, devices: int) -> dict[str, torch.Tensor]:
        module = with_seed(0, Plain)
        with quiet():
            trainer(devices, strategy=strategy, precision="64-true").fit(module, pairs())
        return weights(module)

    assert_same(ended(server(), 3), ended(DDP(timeout=60), 2), atol=1e-12)


def test_only_the_server_has_the_optimizers_state(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "bytes", state_bytes, "on_train_batch_end")
    module = fit(classifier(), digits(), 3, strategy=server(), callbacks=[notes], max_epochs=1)
    assert [steps[-1] for steps in notes.of_ranks()] == [0, 0, 8 * sum(p.numel() for p in module.parameters())]


class At(Callback):
    """Calls something on one rank in the middle of its third step."""

    def __init__(self, rank: int, does: Callable[[], Any]) -> None:
        self.rank, self.does = rank, does

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            self.does()


def bug() -> None:
    raise LookupError("a bug in a step")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(strategy: DataParallel, log: Path, module: Callable[[], Any] = classifier, **options: Any) -> Run:
    def main() -> None:
        with cli.one_line_errors():
            fit(module(), digits(), 3, max_epochs=3, strategy=strategy, **options)

    return Run(main, log=log)


@pytest.mark.parametrize("rank", mostly_slow([0, 1, 2], 1))
@pytest.mark.parametrize("does", [bug, killed])
def test_a_rank_that_dies_in_mid_step_ends_the_run(does: Callable[[], Any], rank: int, tmp_path: Path) -> None:
    run = start(ParamServer(timeout=100), tmp_path / "log", callbacks=[At(rank, does)])
    assert run.wait(30) != 0
    cause = "LookupError: a bug in a step" if does is bug else f"rank {rank} was killed by SIGKILL"
    assert cause in run.output
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == (does is killed), run.output  # what users can do nothing about keeps its traceback
    assert "has gone" not in run.output, run.output


def left_alone(rank: int, path: Path, dies: int = 0) -> None:
    with cli.one_line_errors():
        options: dict[str, Any] = {"callbacks": [At(dies, killed)], "strategy": ParamServer(timeout=100)}
        fit(classifier(), digits(), 2, max_epochs=3, **options)


@pytest.mark.parametrize("dies", mostly_slow([0, 1], 1))
def test_who_is_left_of_ranks_that_torchrun_started_ends_with_one_line(dies: int, tmp_path: Path) -> None:
    runs = launch(partial(left_alone, dies=dies), tmp_path)
    assert [run.wait(30) for run in runs] == [-9 if rank == dies else 2 for rank in range(2)]
    (line,) = [line for line in runs[1 - dies].output.splitlines() if line.startswith("error: ")]
    assert line == f"error: rank {dies} has gone; its own message, if there is one, is above"


@pytest.mark.parametrize("method", mostly_slow(["file", "tcp"], "file"))
def test_ranks_may_meet_anywhere(method: str, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meeting" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    ended = [
        weights(fit(classifier(), digits(), 2, strategy=server(init_method=name), max_steps=3))
        for name in (None, where)
    ]
    assert_same(*ended, atol=0)


def test_a_run_goes_on_under_another_strategy_and_number_of_devices(tmp_path: Path) -> None:
    right = weights(fit(distillation(["ce", "hint"]), digits(), 1, **STEPS | {"max_steps": 16}))
    path = tmp_path / "saved.ckpt"
    chain: list[tuple[Callable[..., DataParallel], int]] = [(server, 3), (ZeRO1, 2), (server, 2), (server, 1)]
    for part, (strategy, devices) in enumerate(chain, 1):
        module = distillation(["ce", "hint"])
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        options = STEPS | {"callbacks": [SaveAndStop(path, 4 * part)], "strategy": strategy()}
        with quiet():
            trainer(devices, **options | {"max_steps": 16}).fit(module, digits(), **resumed)
    assert_same(weights(module), right, atol=1e-9)


def test_all_ranks_validate_with_one_ranks_statistics(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "statistics", statistics, "on_validation_end")
    data = digits(train_size=112, validation_size=20, batch_size=28)
    fit(Normalised(), data, 3, strategy=server(), max_epochs=2, callbacks=[notes])
    ranks = notes.of_ranks()
    assert ranks == [ranks[0]] * 3
    assert len(set(ranks[0])) == len(ranks[0]) == 2


def two_fits(rank: int, path: Path) -> None:
    for _ in range(2):
        module = fit(classifier(), digits(), 2, strategy=server(), precision="64-true")
    torch.save(weights(module), path / f"{rank}.pt")


def test_ranks_that_torchrun_started_fit_more_than_once(tmp_path: Path) -> None:
    for run in launch(two_fits, tmp_path):
        assert run.wait() == 0, run.output
    right = weights(fit(classifier(), digits(), 1, precision="64-true"))
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), right, atol=1e-9)


# What is refused


class Manual(Plain):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_modules_that_step_by_themselves_a_loss_scale_and_lbfgs(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet(), pytest.raises(ValueError, match="param_server: expected automatic optimization of Manual"):
        trainer(2, strategy=server()).fit(Manual(), pairs())
    made = trainer(2, strategy=server())
    monkeypatch.setattr(made.precision_plugin, "scaler", torch.amp.GradScaler("cpu"), raising=False)
    with quiet(), pytest.raises(ValueError, match="precision 16-mixed: expected one without a loss scale"):
        made.fit(Plain(), pairs())
    with quiet(), pytest.raises(ProcessRaisedException, match="param_server: expected an optimizer other than LBFGS"):
        fit(LitClassifier(net(), optimizer=torch.optim.LBFGS), digits(), 2, strategy=server())


def test_a_platform_without_rpc_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(ValueError, match="strategy param_server: expected a torch with"):
        trainer(2, strategy=server())


# With a step for each gradient


def sgd(module: Any) -> Any:
    module.optimization.make_optimizer = partial(torch.optim.SGD, lr=0.1)
    return module


def test_each_workers_gradient_is_a_step_of_its_own() -> None:
    """After a step from the same weights, w - lr * (one gradient + the other) = w - 2 lr * their mean."""
    start = weights(classifier())
    options: dict[str, Any] = {"precision": "64-true", "max_steps": 1, "max_epochs": -1}
    each = weights(fit(sgd(classifier()), digits(), 3, strategy=server(update="each"), **options))
    mean = weights(fit(sgd(classifier()), digits(), **options))
    assert_same(each, {key: start[key].double() + 2 * (mean[key] - start[key]) for key in mean}, atol=1e-12)


class Alike(Callback):
    """Fails where a rank does not have rank zero's weights, or does not know what came late in nine rounds of two."""

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        for p in pl_module.parameters():
            assert torch.equal(p, trainer.strategy.broadcast(p.detach().clone()))
        late = trainer.strategy.staleness
        assert late.total() == 18
        assert late[0] <= 9  # the second gradient of a round lacks the first


def test_with_a_step_for_each_gradient_all_ranks_end_alike() -> None:
    module = fit(sgd(classifier()), digits(), 3, strategy=server(update="each"), callbacks=[Alike()], max_epochs=3)
    assert all(value.isfinite().all() for value in weights(module).values())
    with pytest.raises(ValueError, match="update all: expected mean or each"):
        server(update="all")
