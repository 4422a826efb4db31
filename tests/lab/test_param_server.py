"""A parameter server gives the numbers of one process; asynchronously, workers are as late as they may be, no later."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from harness import cli
from harness.runs.quiet import quiet
from lab.strategies import ParamServer
from strategies import DDP, DataParallel
from tests.callbacks import Notes
from tests.grids import mostly_slow
from tests.processes import Run, launch
from tests.strategies.test_strategies import state_bytes
from tests.training import assert_same, classifier, digits, fit, trainer, weights


def server(**options: Any) -> ParamServer:
    return ParamServer(timeout=60, **options)


class Plain(LightningModule):
    """Anyone's module: its loss is a mean over whatever rows it gets, and nothing in it talks to other ranks."""

    def __init__(self, waits: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.waits = waits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.waits:
            time.sleep(self.waits)
        return F.cross_entropy(self.net(batch[0].to(self.dtype) / 16), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def plain(**options: Any) -> Plain:
    return with_seed(0, lambda: Plain(**options))


def pairs(size: int = 64, batch_size: int = 8) -> Any:
    split = digits().split("train")
    data = torch.utils.data.TensorDataset(split.inputs[:size], split.labels[:size])
    return torch.utils.data.DataLoader(data, batch_size, shuffle=False)


def test_anyones_module_trains_as_under_ddp_on_the_workers_alone() -> None:
    """Lightning's sampler gives two ranks of `ddp`, and two workers beside a server, the same batches."""

    def ended(strategy: DataParallel, devices: int) -> dict[str, torch.Tensor]:
        module = plain()
        with quiet():
            trainer(devices, strategy=strategy, precision="64-true").fit(module, pairs())
        return weights(module)

    assert_same(ended(server(), 3), ended(DDP(timeout=60), 2), atol=1e-12)


def test_only_the_server_has_the_optimizers_state(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "bytes", state_bytes, "on_train_batch_end")
    module = fit(classifier(), digits(), 3, strategy=server(), callbacks=[notes], max_epochs=1)
    assert [steps[-1] for steps in notes.of_ranks()] == [0, 0, 8 * sum(p.numel() for p in module.parameters())]


class Late(Callback):
    """Writes how late gradients were, and how far each rank's parameters are from rank zero's at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        norm = torch.cat([p.detach().flatten() for p in pl_module.parameters()]).double().norm()
        apart = (trainer.strategy.broadcast(norm) - norm).abs().item()
        torch.save((dict(trainer.strategy.staleness), apart), self.path / str(trainer.global_rank))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_workers_are_as_late_as_they_may_be(allowed: int, tmp_path: Path) -> None:
    """Rank 1 is slow, rank 0 goes ahead of it; every gradient is counted, and all end with one set of parameters."""
    with quiet():
        made = trainer(3, strategy=server(max_staleness=allowed), callbacks=[Late(tmp_path)], max_epochs=3)
        made.fit(plain(waits=0.02), pairs(96))
    for rank in range(3):
        counts, apart = torch.load(tmp_path / str(rank))
        assert sum(counts.values()) == 3 * 6 * 2  # epochs, steps, workers
        assert max(counts) <= allowed
        assert (max(counts) > 0) == (allowed > 0)
        assert apart == 0


def test_late_gradients_learn_too() -> None:
    module, split = plain(), digits().split("train")
    with quiet():
        trainer(3, strategy=server(max_staleness=2), max_epochs=20).fit(module, pairs(96))
    right = module.net(split.inputs[:96].float() / 16).argmax(1) == split.labels[:96]
    assert right.double().mean() > 0.9


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


def test_a_staleness_that_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness -1: expected 0"):
        ParamServer(max_staleness=-1)


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
