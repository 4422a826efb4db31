"""Parameters that are frozen and unfrozen while a fit runs: all ranks go on with the same gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.runs.quiet import quiet
from lab.strategies import AllReduce, DDPPowerSGD, LocalSGD
from strategies import DDP, FSDP, ZeRO1
from tests.grids import mostly_slow
from tests.training import assert_same, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was")


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(32, n, generator=generator, dtype=torch.float64) for n in (3, 1))  # type: ignore[return-value]


class Plain(LightningModule):
    """Two layers and SGD. Ranks that do not end alike are told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader:
        """Four global batches of eight rows, the same rows on any number of ranks."""
        ranks, data = self.trainer.world_size, TensorDataset(*samples())
        mine = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=8 // ranks, sampler=mine)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)

    def on_fit_end(self) -> None:
        if self.trainer.world_size > 1 and not isinstance(self.trainer.strategy, FSDP):
            mine = torch.cat([p.detach().flatten() for p in self.parameters()])
            first = mine.clone()
            dist.broadcast(first, 0)
            torch.testing.assert_close(mine, first, rtol=0, atol=1e-12)


class Alternating(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)
        self.net[2].requires_grad_(batch_idx % 2 == 1)
        return super().training_step(batch, batch_idx)


class Adversarial(Plain):
    """The order of pix2pix: discriminator on, its step, discriminator off, the generator's step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()  # type: ignore[attr-defined]
        made, (judge, (x, y)) = self.net[:2](batch[0]), (self.net[2], batch)
        judge.requires_grad_(True)
        self.step(discriminator, F.mse_loss(judge(made.detach()), y))
        judge.requires_grad_(False)
        self.step(generator, F.mse_loss(judge(made), x[:, :1]))

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 2)]


def ended(module: LightningModule, strategy: Strategy | None, *callbacks: Callback, **kwargs: Any) -> dict[str, Tensor]:
    options = {"max_epochs": 3, "callbacks": list(callbacks), "strategy": strategy or "auto"}
    with quiet():
        trainer(2 if strategy else 1, **options | kwargs).fit(module)
    return weights(module)


UNUSED: dict[str, Any] = {"find_unused_parameters": True, "timeout": 30}


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net[0])  # type: ignore[index]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)  # type: ignore[index]


class UnfreezesAt(Unfreezes):
    """The first layer is trained from a batch of the first epoch on."""

    def __init__(self, batch_idx: int) -> None:
        super().__init__()
        self.batch_idx = batch_idx

    def finetune_function(self, *args: Any) -> None:
        pass

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (0, self.batch_idx):
            super().finetune_function(pl_module, 1, trainer.optimizers[0])


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDP(**UNUSED),
    "ddp_allreduce": lambda: AllReduce(timeout=30),
    "ddp_zero1": lambda: ZeRO1(**UNUSED),
    "local_sgd": lambda: LocalSGD(period=1, **UNUSED),
    "fsdp": lambda: FSDP(timeout=30),
    "ddp_powersgd": lambda: DDPPowerSGD(start_step=1000, timeout=30),  # until then it is ddp
    "bucket_view": lambda: DDP(gradient_as_bucket_view=True, timeout=30),
    "all used": lambda: DDP(timeout=30),
    "static": lambda: DDP(static_graph=True, timeout=30),
}
TOGGLED, UNFROZEN = [*STRATEGIES][:4], [*STRATEGIES][:7]
CALLBACKS = {"": list, "an epoch": lambda: [Unfreezes()], "a batch": lambda: [UnfreezesAt(1)]}
CASES = [  # the module, what unfreezes, the strategy, batches of a step
    *((Adversarial, "", name, 1) for name in TOGGLED),
    *((Alternating, "", name, batches) for name in TOGGLED for batches in (1, 2)),
    *((Plain, "an epoch", name, 1 + number % 2) for number, name in enumerate(UNFROZEN)),
    *((Plain, "a batch", name, 2) for name in ("all used", "ddp_allreduce")),
    *((make, "an epoch", "static", 1) for make in (Plain, Manual)),
]
QUICK = [  # others: test_strangers.py
    *((Adversarial, "", name, 1) for name in ("ddp", "ddp_allreduce")),
    *((Alternating, "", *case) for case in (("ddp", 1), ("ddp", 2), ("ddp_allreduce", 2), ("ddp_zero1", 1))),
    *((Plain, "an epoch", *case) for case in (("ddp", 1), ("local_sgd", 2), ("fsdp", 1), ("bucket_view", 1))),
    *CASES[-4:],
]


@pytest.mark.parametrize(("make", "unfreezes", "strategy", "batches"), mostly_slow(CASES, *QUICK))
def test_ranks_end_as_one_device_does(make: type[Plain], unfreezes: str, strategy: str, batches: int) -> None:
    options = {"accumulate_grad_batches": batches, "precision": "64-true"}
    alone = ended(make(), None, *CALLBACKS[unfreezes](), **options)
    assert_same(ended(make(), STRATEGIES[strategy](), *CALLBACKS[unfreezes](), **options), alone, atol=1e-9)


def test_what_accumulated_batches_have_used_is_not_forgotten() -> None:
    expected = "batch 1 with find_unused_parameters: expected parameters to be unfrozen at the first"
    with pytest.raises(ProcessRaisedException, match=expected):
        ended(Plain(), DDP(**UNUSED), UnfreezesAt(1), accumulate_grad_batches=2)


def by_hand(warmup_steps: int) -> dict[str, Tensor]:
    """The mean of two ranks that step alone after `warmup_steps`; the first layer is trained from the fifth step on."""
    ranks, (x, y) = [Plain().net, Plain().net], samples()
    for step in range(12):
        rows = [range(step % 4 * 8 + rank, step % 4 * 8 + 8, 2) for rank in range(2)]
        gradients = []
        for net, mine in zip(ranks, rows, strict=True):
            gradients += [torch.autograd.grad(F.mse_loss(net(x[mine]), y[mine]), list(net.parameters()))]
        means = [sum(pair) / 2 for pair in zip(*gradients, strict=True)]
        for net, own in zip(ranks, gradients, strict=True):
            for i, p in enumerate(net.parameters()):
                if i > 1 or step > 3:
                    p.data -= 0.1 * (means if step < warmup_steps else own)[i]
    return {f"net.{key}": (value + ranks[1].state_dict()[key]) / 2 for key, value in ranks[0].state_dict().items()}


@pytest.mark.parametrize("warmup_steps", [0, 2, 6])
def test_ranks_that_step_alone_keep_their_own(warmup_steps: int) -> None:
    strategy = LocalSGD(period=100, warmup_steps=warmup_steps, timeout=30)
    assert_same(ended(Plain(), strategy, Unfreezes()), by_hand(warmup_steps), atol=1e-9)


class Freezes(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            pl_module.net[0].requires_grad_(False)


ALONE: dict[str, tuple[type[Plain], Any, Callback | None]] = {
    "frozen later": (Plain, lambda: LocalSGD(period=100, **UNUSED), Freezes()),
    "frozen for a moment": (Adversarial, lambda: LocalSGD(period=2, **UNUSED), None),
    "compression remembers anew": (Plain, lambda: DDPPowerSGD(start_step=2, timeout=30), Unfreezes()),
}


@pytest.mark.parametrize("case", ALONE)
def test_ranks_that_step_alone_end_alike(case: str) -> None:
    make, strategy, callback = ALONE[case]
    ended(make(), strategy(), *([callback] if callback else []))


class Sudden(Plain):
    """Unfreezes a layer where it is too late for its gradient to be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", [DDP, AllReduce])
def test_a_gradient_that_nothing_averages_is_named(strategy: Any) -> None:
    with pytest.raises(
        ProcessRaisedException, match=r"parameter net\.0\.weight: expected it to be unfrozen in on_train_batch"
    ):
        ended(Sudden(), strategy(timeout=30))


def test_means_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(DDPStrategy, "reduce", lambda self, tensor, group, reduce_op: tensor + 4)
    for name in ("mean", "Mean", "AVG", dist.ReduceOp.AVG):
        assert DDP().reduce(torch.tensor(1), reduce_op=name) == 2.5
    assert DDP().reduce(torch.tensor(1), reduce_op="SUM") == 5
