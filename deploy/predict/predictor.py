"""A net that predicts samples on any number of ranks, to the same bits."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from apprentice.batch import Batch
from datamodules.loaders import ChunkLoader
from datamodules.preparation import Preparation
from datamodules.splits import Split
from datamodules.streams import SampleStream
from harness.runs.files import atomic


class Guesses(NamedTuple):
    """The most probable classes of n samples, the first one first."""

    classes: Tensor  # (n, k) int64
    probabilities: Tensor  # (n, k) float32

    @classmethod
    def of(cls, logits: Tensor, k: int) -> "Guesses":
        """The k classes of the largest logits (n, classes)."""
        best = logits.double().softmax(1).topk(k)
        return cls(best.indices.cpu(), best.values.float().cpu())


class InputData(LightningDataModule):
    """Samples in chunks that do not depend on the number of ranks, so that kernels give the same bits."""

    def __init__(self, samples: Split | SampleStream, batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def predict_dataloader(self) -> ChunkLoader:
        trainer = self.trainer
        assert trainer is not None
        place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        device, devices = trainer.strategy.root_device, trainer.num_devices
        samples = (
            self.samples.to(device, devices) if isinstance(self.samples, SampleStream) else self.samples.to(device)
        )
        return ChunkLoader(samples, self.batch_size, place["rank"], place["num_replicas"])


class Predictor(LightningModule):
    """Predicts by a net, and leaves what all ranks found in a file, in the order of the samples.

    Args:
        net: in eval mode; gives logits (b, classes).
        preparation: how stored samples become their inputs.
        path: the file, for torch.load: by name what was READ (n,), and the fields of the guesses, or `outputs` (n, D).
        top: number of classes that are kept of each sample; None keeps whole outputs, as of a net that embeds.
    """

    def __init__(self, net: nn.Module, preparation: Preparation, path: Path, top: int | None) -> None:
        super().__init__()
        self.net = net
        self.preparation, self.path, self.top = preparation, path, top
        self.parts: list[tuple[Tensor, dict[str, Tensor]]] = []

    def on_predict_epoch_start(self) -> None:
        self.parts = []

    def predict_step(self, batch: Batch, *_: Any) -> Tensor:
        """Keep the guesses of a chunk; returns its places (b,), as Lightning warns of a step that returns nothing."""
        if not len(batch.inputs):  # the last chunk of a rank
            return batch.index
        dtype = next((p.dtype for p in self.net.parameters()), torch.float32)
        outputs = self.net(self.preparation.normalize(batch.inputs, dtype))
        kept = {"outputs": outputs.cpu()} if self.top is None else Guesses.of(outputs, self.top)._asdict()
        self.parts.append((batch.index.cpu(), {"read": batch.labels.cpu(), **kept}))
        return batch.index

    def on_predict_epoch_end(self) -> None:
        """Write the file, on rank zero."""
        parts = [self.parts]
        if dist.is_initialized():
            parts = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, self.parts)
        if not self.trainer.is_global_zero:
            return
        chunks = [part for of_rank in parts for part in of_rank]
        order = torch.cat([places for places, _ in chunks]).argsort()
        rows = {name: torch.cat([values[name] for _, values in chunks])[order] for name in chunks[0][1]}
        with atomic(self.path) as temporary:
            torch.save(rows, temporary)
