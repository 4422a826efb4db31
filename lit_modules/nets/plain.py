"""The teacher and the student of the tutorial: convolutions, then two linear layers."""

import torch
from torch import Tensor, nn

from apprentice.keyed import Dropout
from lit_modules.nets.base import Net, Shape, of_images


class _Plain(Net):
    """Convolutional features, then a classifier of two linear layers with dropout between them."""

    feature_layer = "features"
    pooled_layer = "classifier<"

    def __init__(
        self, features: list[nn.Module], hidden: int, input_shape: Shape, num_classes: int, dropout: float
    ) -> None:
        super().__init__()
        _, height, width = of_images(input_shape)
        if min(height, width) < 4:
            raise ValueError(f"input_shape {tuple(input_shape)}: expected at least 4 x 4 pixels")
        self.features = nn.Sequential(*features)
        pools = [number for number, module in enumerate(features) if isinstance(module, nn.MaxPool2d)]
        self.stages = tuple(f"features.{number}" for number in pools)
        self.preactivations = tuple(f"features.{number - 1}<" for number in pools)  # before ReLU, and the pool
        channels = [m.out_channels for m in features if isinstance(m, nn.Conv2d)][-1]
        self.classifier = nn.Sequential(
            nn.Linear(channels * (height // 4) * (width // 4), hidden), nn.ReLU(),
            Dropout(dropout), nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        return self.classifier(torch.flatten(self.features(images), 1))

    def pipeline_stages(self) -> list[nn.Module]:
        """Each layer."""
        return [*self.features, nn.Flatten(1), *self.classifier]


class DeepNN(_Plain):
    """The tutorial's teacher: four convolutions; 1,186,986 parameters for 3 x 32 x 32 and ten classes.

    Source: PyTorch, "Knowledge Distillation Tutorial". `input_shape` is (C, H, W), `dropout` the probability of a zero.
    """

    def __init__(self, input_shape: Shape = (3, 32, 32), num_classes: int = 10, dropout: float = 0.1) -> None:
        features = [
            nn.Conv2d(input_shape[0], 128, 3, padding=1), nn.ReLU(),
            nn.Conv2d(128, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        ]  # fmt: skip
        super().__init__(features, 512, input_shape, num_classes, dropout)


class LightNN(_Plain):
    """The tutorial's student: two convolutions; 267,738 parameters for 3 x 32 x 32 and ten classes.

    Source: PyTorch, "Knowledge Distillation Tutorial". `input_shape` is (C, H, W), `dropout` the probability of a zero.
    """

    def __init__(self, input_shape: Shape = (3, 32, 32), num_classes: int = 10, dropout: float = 0.1) -> None:
        features = [
            nn.Conv2d(input_shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        ]  # fmt: skip
        super().__init__(features, 256, input_shape, num_classes, dropout)
