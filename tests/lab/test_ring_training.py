"""Training over the ring, and by hand, is training with `ddp`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lab.strategies import AllReduce, DDPRing
from lab.strategies.allreduce import Buckets
from strategies import DDP, DataParallel
from tests.callbacks import Notes
from tests.ranks import in_ranks
from tests.strategies.test_strategies import OPTIONS, alone, trained
from tests.training import assert_agree, assert_same, classifier, digits, fit, trainer, weights

CLIPPED = OPTIONS["accumulated and clipped"]


@pytest.mark.slow
def test_both_train_as_ddp_does(tmp_path: Path) -> None:
    names = ("ddp", "ddp_ring", "ddp_allreduce")
    ddp, around, by_hand = (trained("students", f"{name} 3", tmp_path, **CLIPPED) for name in names)
    assert_same(around[1], ddp[1])  # to the bit: its sums have the order of gloo's
    assert_agree(ddp, by_hand, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "devices", "ring", "by_hand"),
    [
        ("students", 8, {}, {"process_group_backend": "gloo"}),
        ("resnet8", 3, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.1}),  # BatchNorm over the global batch
    ],
)
def test_several_processes_agree_with_one(run: str, devices: int, ring: Any, by_hand: Any, tmp_path: Path) -> None:
    for strategy in (DDPRing(timeout=60, **ring), AllReduce(timeout=60, **by_hand)):
        assert_agree(alone(run, "plain"), trained(run, f"auto {devices}", tmp_path, strategy=strategy))


def test_the_ring_is_exact(tmp_path: Path) -> None:
    places = ("ddp 1 exact 3", "ddp_ring 3 exact 3")
    one, three = (trained("students", place, tmp_path, precision=32, max_steps=10) for place in places)
    assert one[0] == three[0]
    assert_same(one[1], three[1])


# By hand


def sends(_trainer: Any, _module: LightningModule) -> float:
    return Buckets.sent  # type: ignore[attr-defined, no-any-return]


def test_accumulated_batches_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    average = Buckets.average

    def counted(self: Buckets) -> None:
        Buckets.sent += len(self.buckets)  # type: ignore[attr-defined]
        average(self)

    monkeypatch.setattr(Buckets, "sent", 0, raising=False)
    monkeypatch.setattr(Buckets, "average", counted)
    notes = Notes(tmp_path / "sends", sends, "on_train_batch_end")
    options = {"accumulate_grad_batches": 3, "max_epochs": 1, "callbacks": [notes]}
    fit(classifier(), digits(train_size=185), 2, strategy=AllReduce(timeout=60), **options)  # five batches
    assert notes.of_ranks() == [[0, 0, 1, 1, 2]] * 2  # the epoch's end is one, too


@in_ranks(3, backend="gloo")
def test_gradients_are_averaged_in_buckets() -> None:
    rank = dist.get_rank()
    a, b, c, wide = (nn.Parameter(torch.zeros(2, 3)) for _ in range(4))
    other = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    unused = nn.Parameter(torch.zeros(5))
    wide.data = torch.zeros(1000)
    buckets = Buckets([a, other, b, wide, unused, c], cap_mb=100 / 2**20)
    assert [[p.numel() for p in bucket] for bucket in buckets.buckets] == [[6, 6], [1000], [5, 6], [4]]
    a.grad = torch.full((3, 2), float(rank)).t()
    if rank == 1:
        b.grad = torch.full((2, 3), 3.0)
    wide.grad, other.grad, c.grad = (
        torch.ones(1000),
        torch.full((4,), 3 * rank + 1.5, dtype=torch.float64),
        -torch.ones(2, 3),
    )
    for _ in range(2):  # what is averaged already stays as it is
        buckets.average()
        grads = {name: p.grad for name, p in (("a", a), ("b", b), ("c", c), ("wide", wide), ("other", other))}
        assert {name: set(grad.flatten().tolist()) for name, grad in grads.items() if grad is not None} == {
            "a": {1.0}, "b": {1.0}, "c": {-1.0}, "wide": {1.0}, "other": {4.5},
        }  # fmt: skip
        assert unused.grad is None


class Normalised(LightningModule):
    """Its BatchNorm keeps statistics of what a rank sees."""

    def __init__(self, lr: float = 1e-4, momentum: float = 0.0) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(64)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(self.norm(images.flatten(1).to(self.layer.weight.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch.inputs).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch.inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, self.momentum)


class ByHand(Normalised):
    """Two backward passes a step."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        outputs = self(batch.inputs)
        self.manual_backward(outputs.square().mean(), retain_graph=True)
        self.manual_backward(outputs.mean())
        optimizer.step()


def statistics(_trainer: Any, module: LightningModule) -> float:
    return module.get_buffer("norm.running_var").sum().item()


def test_manual_optimization_and_statistics_of_a_ranks_own(tmp_path: Path) -> None:
    def fitted(strategy: DataParallel, **options: Any) -> dict[str, Tensor]:
        data = digits(train_size=112, validation_size=20, batch_size=28)
        return weights(fit(ByHand(), data, 2, strategy=strategy, precision="64-true", max_epochs=2, **options))

    notes = Notes(tmp_path / "statistics", statistics, "on_validation_end")
    ours, right = fitted(AllReduce(timeout=60), callbacks=[notes]), fitted(DDP(timeout=60))
    assert_same(ours, right, atol=1e-12)
    first, second = notes.of_ranks()
    assert first == second != []


# What can't be


def test_options_that_can_not_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb 0: expected MiB, above 0"):
        AllReduce(bucket_cap_mb=0)
    with pytest.raises(TypeError, match="process_group_backend"):
        DDPRing(process_group_backend="gloo")
    monkeypatch.setattr(DDPRing, "root_device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="accelerator cuda: expected cpu"):
        trainer(2, strategy=DDPRing())
