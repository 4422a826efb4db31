"""Modules that a pipeline trains in tests, cut into stages in several ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from harness.runs.quiet import quiet
from lit_modules.nets import DeepNN, ResNet, Torchvision
from strategies import DDP, PipelineStrategy
from tests.callbacks import Notes
from tests.training import classifier, digits, distillation, fit, trainer, weights

Make = Callable[[], LightningModule]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
# Devices, and what makes of them 2, 3 and 4 stages in a row, and two pipelines of two stages side by side.
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"schedule": "GPipe"}),
    "3": (3, {"schedule": "1F1B"}),
    "4": (2, {"schedule": "InterleavedZeroBubble"}),
    "2x2": (4, {"schedule": "1F1B", "data_parallel_size": 2}),
}
MODULES: dict[str, Make] = {
    "teacher": lambda: classifier(DeepNN),
    "students": distillation,
    "resnet8": lambda: classifier(ResNet, depth=8, norm="group"),
    "resnet50": lambda: classifier(Torchvision, name="resnet50", norm="group"),
}


def pipeline(**options: Any) -> PipelineStrategy:
    return PipelineStrategy(timeout=60, **options)


def fitted(make: Make, devices: int = 1, strategy: Any = None, **kwargs: Any) -> LightningModule:
    data = kwargs.pop("data", {})
    return fit(make(), digits(**data), devices, strategy=strategy or DDP(timeout=60), **kwargs)


class Conv(LightningModule):
    """Anyone's module: plain layers, one that works in place, tuples between stages, what is logged in usual ways."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(2, 8), *extra)
        self.second, self.third = Forked(), Joined()
        self.last = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(10)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(*self.second(self.first(x))))

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.first, self.second, self.third, *self.last]

    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch.labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch.inputs)
        loss = F.cross_entropy(logits, batch.labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(logits))
        self.log("norm", logits.norm(dim=1).mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch.inputs)
        self.accuracy(logits, batch.labels)
        self.log("val_loss", F.cross_entropy(logits, batch.labels), sync_dist=True, batch_size=len(logits))
        self.log("val_acc", self.accuracy, batch_size=len(logits))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch.inputs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plateau(Conv):
    """Its learning rate follows what validation says."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Forked(nn.Module):
    """Gives what is differentiated, what is not, and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.conv(x), x.detach(), x.argmax(1), x


class Joined(nn.Module):
    def forward(self, y: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not kept.requires_grad
        return y.relu() + 0.1 * kept + 0.01 * index[:, None] + x


class Plain(LightningModule):
    """Four layers; batches are pairs of tensors (b, 6) and (b,)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.net)

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.pipeline_loss(self(batch[0]), batch)
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def variant(name: str, *layers: nn.Module, **members: Any) -> Make:
    """Makes a `Plain` of another class, with other members: methods, attributes, modules."""

    def make() -> LightningModule:
        module = type(name, (Plain,), {k: x for k, x in members.items() if not isinstance(x, nn.Module)})(*layers)
        for key, part in members.items():
            if isinstance(part, nn.Module):
                setattr(module, key, part)
        return module

    return make


def loss(self: Any, output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


class Clock:
    """Stands in for the module `time` where layers are timed; only layers of tests move it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Clock.now += 1
        return x * self.scale


def note_places(folder: Path) -> Notes:
    """Notes the names of the parameters that a rank keeps."""

    def names(_trainer: Any, module: Any) -> list[str]:
        return [name for name, p in module.named_parameters() if not p.is_meta]

    return Notes(folder, names, "on_train_start")


def pairs(rows: int = 37) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 6, generator=generator).double(), torch.arange(rows) % 3)


def ended(
    make: Callable[[], LightningModule], strategy: Any = None, data: Any = None, devices: int = 2, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], LightningModule]:
    options: dict[str, Any] = {"max_epochs": 3, "precision": "64-true"}
    module, made = make(), trainer(devices if strategy else 1, strategy=strategy or "auto", **options | kwargs)
    with quiet():
        made.fit(module, DataLoader(pairs(), batch_size=8) if data is None else data())
    return weights(module), module
