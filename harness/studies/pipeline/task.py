"""The task of PyTorch's tutorial: training on noise, for the time it takes."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

LEARNING_RATE = 0.001  # the tutorial's


class Pairs(NamedTuple):
    """Images (B, C, H, W) with one-hot labels (B, classes)."""

    images: Tensor
    targets: Tensor


class Noise:
    """A loader of one batch of noise, `steps` times; the tutorial draws new ones, which takes time on no device.

    `input_shape` is that of an image, (C, H, W).
    """

    def __init__(self, batch_size: int, input_shape: Sequence[int], num_classes: int, steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(num_classes, (batch_size,), generator=generator)
        images = torch.randn(batch_size, *input_shape, generator=generator)
        self.batch, self.steps = Pairs(images, F.one_hot(labels, num_classes).float()), steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Pairs]:
        return iter([self.batch] * self.steps)


class Task(LightningModule):
    """Trains the outputs of a net, the composition of `layers`, to be one-hot labels, by mean squared error and SGD.

    One device cuts a batch into `num_microbatches`; a pipeline strategy cuts by itself.
    """

    def __init__(self, layers: Sequence[nn.Module], num_microbatches: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.num_microbatches = num_microbatches
        self.automatic_optimization = num_microbatches == 1  # else the step does backward

    def forward(self, images: Tensor) -> Tensor:
        """Outputs (B, classes) of images (B, C, H, W)."""
        x: Any = images
        for layer in self.layers:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x

    def training_step(self, batch: Pairs, batch_idx: int) -> Tensor | None:
        """The loss; None for micro-batches, whose step is taken here."""
        if self.automatic_optimization:
            return self.pipeline_loss(self(batch.images), batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        pieces = (x.tensor_split(self.num_microbatches) for x in batch)
        for piece in map(Pairs, *pieces):
            loss = self.pipeline_loss(self(piece.images), piece)
            self.manual_backward(loss * (len(piece.images) / len(batch.images)))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Optimizer:
        """The tutorial's."""
        return SGD(self.parameters(), LEARNING_RATE)

    def pipeline_stages(self) -> list[nn.Module]:
        """The layers."""
        return list(self.layers)

    def pipeline_loss(self, output: Tensor, batch: Pairs) -> Tensor:
        """Mean squared error, on the device of the outputs."""
        return F.mse_loss(output, batch.targets.to(output.device))
