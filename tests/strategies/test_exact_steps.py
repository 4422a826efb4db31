"""Under `exact` a module's steps have random numbers of their own, no collectives, and one way to log."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed import all_reduce as known_as
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric, MetricCollection

from apprentice import replicas
from harness.runs.quiet import quiet
from strategies import DDP, PipelineStrategy
from tests.pipelines import Plain, ended, loss, pairs, variant
from tests.training import assert_same, trainer, weights


class Noisy(Dataset):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, i: int) -> Tensor:
        return torch.rand(3) + i + random.random() + float(np.random.rand())  # noqa: NPY002 - as users do


class Line(LightningModule):
    """One layer; `step` is what a test adds to its steps."""

    def __init__(self, step: Callable[["Line", Tensor], Any] = lambda *_: 0.0) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.mean, self.synced = MeanMetric(), MeanMetric(dist_sync_on_step=True)
        self.hidden = [MeanMetric()]
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor) -> Tensor:
        noise = float(self.step(self, batch) or 0.0)
        return self(batch).square().mean() * (1 + noise)

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", self(batch).mean() + float(self.step(self, batch) or 0.0))

    def predict_step(self, batch: Tensor) -> Tensor:
        self.step(self, batch)
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def draw(*_: Any) -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())  # noqa: NPY002


class Unlike(Line):
    """Each rank starts with other random numbers, as ranks do that a launcher starts without a seed."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(self.global_rank)
        random.seed(self.global_rank)
        np.random.seed(self.global_rank)  # noqa: NPY002


def fitted(make: Callable[[], LightningModule], devices: int = 1, strategy: Any = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    module, workers = make(), kwargs.pop("workers", 0)
    torch.rand(devices)  # whatever has been drawn before the Trainer runs
    sampler = WeightedRandomSampler([1.0] * 6 + [5.0] * 7, 13)
    train = DataLoader(Noisy(), 5, sampler=sampler, num_workers=workers)
    made = trainer(devices, strategy=strategy or DDP(timeout=60, exact=3), **kwargs)
    with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        made.fit(module, train, DataLoader(Noisy(), 4))
    return weights(module), {name: float(value) for name, value in made.callback_metrics.items()}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Line(draw), {}),
        (lambda: Line(draw), {"use_distributed_sampler": False}),
        (lambda: Line(draw), {"workers": 1, "max_epochs": 1}),
        (lambda: Unlike(draw), {"use_distributed_sampler": False}),
    ],
    ids=["sampler", "own_order", "workers", "unseeded"],
)
def test_what_data_and_steps_draw_is_the_same_on_any_number_of_devices(
    make: Callable[[], LightningModule], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set here, so that they are put back
        monkeypatch.setenv(name, "0")

    def run(devices: int) -> Any:
        seed_everything(3, workers=True, verbose=False)
        return fitted(make, devices, **options)

    one = run(1)
    for devices in (2, 3) if options == {} else (2,):
        other = run(devices)
        assert_same(one[0], other[0])
        assert one[1] == other[1]


CALLS: dict[str, tuple[Callable[[Line, Tensor], Any], str]] = {
    "all_gather": (lambda module, x: module.all_gather(x), r"trainer\.strategy\.all_gather"),
    "reduce": (lambda module, x: module.trainer.strategy.reduce(x), r"trainer\.strategy\.reduce"),
    "barrier": (lambda module, _: module.trainer.strategy.barrier(), r"trainer\.strategy\.barrier"),
    "broadcast": (lambda module, _: module.trainer.strategy.broadcast("x"), r"trainer\.strategy\.broadcast"),
    "all_reduce": (lambda _, x: dist.all_reduce(x), r"torch\.distributed\.all_reduce"),
    "objects": (lambda _, x: dist.all_gather_object([None], 1), r"torch\.distributed\.all_gather_object"),
    "compute": (lambda m, _: (m.mean.update(1.0), m.mean.compute()), r"MeanMetric\.compute\(\)"),
    "collection": (lambda m, x: (m.mean(x), MetricCollection([m.mean]).compute()), r"MeanMetric\.compute\(\)"),
    "synced": (lambda m, x: m.synced(x), r"MeanMetric\.compute\(\)"),
}


def refused(step: str, call: str) -> str:
    return rf"exact \d+: expected a {step} without collectives, .*; it calls {CALLS[call][1]}"


@pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
@pytest.mark.parametrize("call", CALLS)
def test_a_collective_in_a_step_is_refused_on_one_device(call: str) -> None:
    before = dict(vars(dist)), dict(vars(dist.ProcessGroup))
    with pytest.raises(ValueError, match=refused("training_step", call)):
        fitted(lambda: Line(CALLS[call][0]), num_sanity_val_steps=0)
    with pytest.raises(ValueError, match=refused("validation_step", call)):
        fitted(lambda: Line(CALLS[call][0]), num_sanity_val_steps=1)
    made, module = trainer(strategy=DDP(exact=3)), Line(CALLS[call][0])
    with pytest.raises(ValueError, match=refused("predict_step", call)):
        made.predict(module, DataLoader(Noisy(), 5))
    assert before == (dict(vars(dist)), dict(vars(dist.ProcessGroup)))


@pytest.mark.parametrize("call", ["all_gather", "all_reduce", "synced"])
def test_a_collective_in_a_step_is_refused_on_two_devices(call: str) -> None:
    with pytest.raises(Exception, match=refused("training_step", call)):
        fitted(lambda: Line(CALLS[call][0]), 2)


def test_a_collective_under_another_name_is_refused_too() -> None:
    with pytest.raises(Exception, match=r"without collectives, .*; it calls ProcessGroup\.allreduce"):
        fitted(lambda: Line(lambda _, x: known_as(x)), 2)


# Communicates where only the last rank of a pipeline computes, and after `forward`, which does too.
IN_LOSS = variant(
    "InLoss",
    training_step=lambda self, batch: loss(self, self(batch[0]), batch),
    pipeline_loss=lambda self, output, batch: dist.barrier() or loss(self, output, batch),
)
IN_STEP = variant("InStep", training_step=lambda self, batch: self.all_gather(Plain.training_step(self, batch)).mean())


@pytest.mark.parametrize(("make", "step"), [(IN_LOSS, "pipeline_loss"), (IN_STEP, "training_step")])
def test_a_collective_in_a_pipelines_step_is_refused(make: Callable[[], LightningModule], step: str) -> None:
    with pytest.raises(Exception, match=rf"exact \d+: expected a {step} without collectives"):
        ended(make, PipelineStrategy(timeout=60, exact=4), precision="32-true", data=floats)


def floats() -> DataLoader:
    x, y = pairs(8).tensors
    return DataLoader(TensorDataset(x.float(), y), 4)


class Hooked(Line):
    """Collectives in hooks, metrics' own values and synchronised logs in steps: all that goes."""

    def training_step(self, batch: Tensor) -> Tensor:
        self.log("synced", self.mean(batch), sync_dist=True)
        return super().training_step(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.all_gather(self.net.weight)
        self.trainer.strategy.barrier()
        self.log("so_far", self.mean.compute(), sync_dist=True)


def test_hooks_may_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    one, two = (fitted(lambda: Hooked(draw), devices, max_epochs=1) for devices in (1, 2))
    assert {"synced", "so_far", "val"} == one[1].keys()
    assert one[1] == two[1]


def loud(name: str) -> Callable[[Line, Tensor], Any]:
    return {
        "callable": lambda m, x: m.log("x", x.mean(), reduce_fx=torch.median),
        "hidden": lambda m, x: (m.hidden[0](x), m.log("x", m.hidden[0], on_step=False, on_epoch=True)),
        "named": lambda m, x: (m.hidden[0](x), m.log("x", m.hidden[0], metric_attribute="hidden.0")),
        "rows": lambda m, x: m.log("x", x),
    }[name]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("callable", MisconfigurationException, "Only `self.log"),
        ("hidden", MisconfigurationException, "Could not find the `LightningModule` attribute"),
        ("named", ValueError, r"exact \d: expected a metric that is a submodule; x logs one that is not"),
        ("rows", ValueError, "must have a single element"),
    ],
)
def test_what_can_not_be_logged_is_refused_as_lightning_refuses_it(name: str, kind: type, message: str) -> None:
    plain: list[Any] = ["auto"] if name != "named" else []
    for strategy in [None, *plain]:
        for sanity in (0, 1):
            with pytest.raises(kind, match=message):
                fitted(lambda: Line(loud(name)), strategy=strategy, num_sanity_val_steps=sanity)


class Partial(Line):
    def training_step(self, batch: Tensor) -> Tensor:
        self.log("all", batch.mean())
        if self.when(self):
            self.log("some", batch.mean(), rank_zero_only=True)
        return super().training_step(batch)

    def __init__(self, when: Callable[["Partial"], bool]) -> None:
        super().__init__()
        self.when = when


ON_RANK_ZERO, IN_THE_FIRST_SHARD = lambda module: module.global_rank == 0, lambda _: replicas.first_row() == 0


@pytest.mark.parametrize(("when", "devices"), [(IN_THE_FIRST_SHARD, 1), (IN_THE_FIRST_SHARD, 2), (ON_RANK_ZERO, 2)])
def test_shards_that_log_other_names_are_refused(when: Callable[[Partial], bool], devices: int) -> None:
    with pytest.raises(
        Exception, match=r"exact \d: expected each shard to log the same; one logs all, some, another all"
    ):
        fitted(lambda: Partial(when), devices, num_sanity_val_steps=0)
