"""LightningModules, data and callbacks as users of Lightning write them: nothing here knows of this suite."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

ROWS = 48


def points(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + 0.5 * x[:, 3:]).argmax(1))


def sentences() -> TensorDataset:
    """Seven tokens of a vocabulary of nine."""
    return TensorDataset(torch.randint(9, (ROWS, 7), generator=torch.Generator().manual_seed(1)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Classifier(LightningModule):
    """The README's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).double().mean(), prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.02)

    # What a pipeline asks for

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.net)

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1])


class GAN(LightningModule):
    """Two optimizers in turn, by hand; the noise comes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (z,) = batch
        real = z.cumsum(1)
        optimizer_g, optimizer_d = self.optimizers()
        scheduler_g, _ = self.lr_schedulers()

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self(z), True)
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        d_loss = (self.adversarial_loss(real, True) + self.adversarial_loss(self(z).detach(), False)) / 2
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        scheduler_g.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer_g = Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999))
        optimizer_d = Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.999))
        optimizers = optimizer_g, optimizer_d
        return list(optimizers), [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


class SemiSupervised(Classifier):
    """Labelled and unlabelled batches at once, and two sets to validate on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["labelled"]
        (u,) = batch["unlabelled"]
        consistency = F.mse_loss(self(u).softmax(1), self(u + 0.1).softmax(1))
        loss = F.cross_entropy(self(x), y) + consistency
        self.log("train_loss", loss, sync_dist=True, batch_size=len(x))
        self.log("consistency", consistency, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).double().mean(), sync_dist=True)
        self.log("val_top", logits.max(), reduce_fx="max", sync_dist=True)

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().pipeline_loss(output, batch["labelled"])


class Stream(IterableDataset):
    """A file that is read row by row; ranks and workers take turns."""

    def __init__(self, num_replicas: int = 1, rank: int = 0, rows: int = ROWS) -> None:
        self.num_replicas, self.rank, self.rows = num_replicas, rank, rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        data: Any = points(self.rows)
        for i in range(self.rank * workers + number, self.rows, self.num_replicas * workers):
            yield data[i]


class Streamed(Classifier):
    """Reads a stream by two workers a rank."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        stream = Stream(**self.trainer.distributed_sampler_kwargs or {})
        return DataLoader(stream, self.batch_size, num_workers=2, multiprocessing_context="fork")


class Unequal(Classifier):
    """Validated on 11 rows, of which one rank has more than another."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Stream(**self.trainer.distributed_sampler_kwargs or {}, rows=11), 12)


class Measured(Classifier):
    """Metrics as objects: one, a collection, one that is computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        metrics = MetricCollection({"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)})
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")
        self.brier, self.confusion = MeanSquaredError().set_dtype(torch.float64), MulticlassConfusionMatrix(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_metrics.update(logits, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.brier(logits.softmax(1), F.one_hot(y, 3).to(logits))
        self.log("brier", self.brier, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_metrics(logits, y)
        self.log_dict(self.val_metrics)
        self.confusion.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        table = self.confusion.compute()
        self.log("hits", table.trace().double())
        self.confusion.reset()


class Backbone(Classifier):
    """A frozen embedding under a backbone that a callback unfreezes, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6).requires_grad_(False)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.net = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(self.embed(x)))

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.embed, *self.backbone, self.net]

    def configure_optimizers(self) -> Any:
        return Adam((p for p in self.parameters() if p.requires_grad), lr=0.02)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class Tied(LightningModule):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (b, t, 8)
        return self.head(x + self.block(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.pipeline_loss(self(batch[0][:, :-1]), batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5, momentum=0.9)

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.embedding, self.block, self.head]

    def pipeline_loss(self, logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


class Scheduled(Classifier):
    """A learning rate that changes with every step, over as many as there will be."""

    def configure_optimizers(self) -> Any:
        decay = [{"params": self.net[0].parameters(), "weight_decay": 0.1}, {"params": self.net[1:].parameters()}]
        optimizer = AdamW(decay, lr=0.02)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"])


class Late(Classifier):
    """Makes its layers where they will be."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()


class Normed(Classifier):
    """Logs the norms of its gradients, as Lightning's documentation does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class Gathered(Classifier):
    """Its loss is of the outputs for all rows of the global batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.pipeline_loss(self(batch[0]), batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().pipeline_loss(output, batch) + self.all_gather(output, sync_grads=True).square().mean()

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}


class Penalized(Classifier):
    """A gradient penalty, as a WGAN's critic has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        logits = self(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        loss = F.cross_entropy(logits, batch[1]) + (gradient.norm(dim=1) - 1).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Lasso(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * torch.stack([p.abs().sum() for p in self.parameters()]).sum()


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.temperature


class Tempered(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().append(Temperature())


class Writer(BasePredictionWriter):
    """One file a rank of what is predicted by the batch, and one of the epoch; each row with its place in the set."""

    def __init__(self, folder: Path, inputs: Tensor) -> None:
        super().__init__("batch_and_epoch")
        self.folder, self.inputs = folder, inputs
        self.batches: list[Any] = []

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Tensor, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        torch.testing.assert_close(batch[0], self.inputs[indices])
        self.batches.append((loader, list(indices), prediction))

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, indices: Any) -> None:
        predictions = [predictions] if len(indices) == 1 else predictions
        epoch = [
            (loader, list(rows), prediction)
            for loader, found in enumerate(zip(indices, predictions, strict=True))
            for rows, prediction in zip(*found, strict=True)
        ]
        torch.save((self.batches, epoch), self.folder / f"rank{trainer.global_rank}.pt")


def joined(folder: Path, interval: int) -> dict[tuple[int, int], Tensor]:
    """By loader and place in the set, what all ranks have written; fails where a row is there twice."""
    found: dict[tuple[int, int], Tensor] = {}
    for path in folder.glob("rank*.pt"):
        for loader, rows, prediction in torch.load(path)[interval]:
            for row, values in zip(rows, prediction, strict=True):
                assert (loader, row) not in found
                found[loader, row] = values
    return dict(sorted(found.items()))
