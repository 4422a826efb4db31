"""Nets of the tutorials: convolutions, then linear layers."""

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.base import Net, Shape, check_sizes, check_widths, image_shape


class _Chain(Net):
    """Convolutional features, then a classifier."""

    feature_layer = "features"
    pooled_layer = "classifier<"
    features: nn.Sequential
    classifier: nn.Sequential

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.features, nn.Flatten(1), *self.classifier]


class _Plain(_Chain):
    """Convolutions that keep the size, and two pools; a classifier of two linear layers with dropout between them."""

    def __init__(
        self, features: list[nn.Module], hidden: int, input_shape: Shape, num_classes: int, dropout: float
    ) -> None:
        super().__init__()
        _, height, width = image_shape(input_shape)
        if min(height, width) < 4:
            raise BadInput("input_shape", tuple(input_shape), "at least 4 x 4 pixels")
        check_sizes(hidden=hidden)
        self.features = nn.Sequential(*features)
        pools = [number for number, module in enumerate(features) if isinstance(module, nn.MaxPool2d)]
        self.stages = tuple(f"features.{number}" for number in pools)
        self.preactivations = tuple(f"features.{number - 1}<" for number in pools)  # before ReLU, and the pool
        channels = [m.out_channels for m in features if isinstance(m, nn.Conv2d)][-1]
        self.classifier = nn.Sequential(
            nn.Linear(channels * (height // 4) * (width // 4), hidden), nn.ReLU(),
            Dropout(dropout), nn.Linear(hidden, num_classes),
        )  # fmt: skip


class _Small(_Chain):
    """Two 5 x 5 convolutions without padding, each with a ReLU, at the paths `relus`, and 2 x 2 max pooling."""

    def __init__(self, features: list[nn.Module], relus: tuple[str, str], input_shape: Shape) -> None:
        super().__init__()
        _, height, width = image_shape(input_shape)
        if min(height, width) < 16:
            raise BadInput("input_shape", tuple(input_shape), "at least 16 x 16 pixels")
        self.features = nn.Sequential(*features)
        self.stages, self.preactivations = relus, tuple(f"{relu}<" for relu in relus)
        self.positions = (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)


class DeepNN(_Plain):
    """The tutorial's teacher: four convolutions; 1,186,986 parameters for 3 x 32 x 32 and ten classes.

    Source: PyTorch, "Knowledge Distillation Tutorial".

    Args:
        dropout: the probability of a zero.
        widths: channels of the four convolutions.
        hidden: outputs of the first linear layer.
    """

    def __init__(
        self, input_shape: Shape = (3, 32, 32), num_classes: int = 10, dropout: float = 0.1,
        widths: tuple[int, int, int, int] = (128, 64, 64, 32), hidden: int = 512,
    ) -> None:  # fmt: skip
        first, second, third, fourth = check_widths(widths, 4)
        features = [
            nn.Conv2d(input_shape[0], first, 3, padding=1), nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(second, third, 3, padding=1), nn.ReLU(),
            nn.Conv2d(third, fourth, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        ]  # fmt: skip
        super().__init__(features, hidden, input_shape, num_classes, dropout)


class LightNN(_Plain):
    """The tutorial's student: two convolutions; 267,738 parameters for 3 x 32 x 32 and ten classes.

    Source: PyTorch, "Knowledge Distillation Tutorial".

    Args:
        dropout: the probability of a zero.
        widths: channels of the two convolutions.
        hidden: outputs of the first linear layer.
    """

    def __init__(
        self, input_shape: Shape = (3, 32, 32), num_classes: int = 10, dropout: float = 0.1,
        widths: tuple[int, int] = (16, 16), hidden: int = 256,
    ) -> None:  # fmt: skip
        first, second = check_widths(widths, 2)
        features = [
            nn.Conv2d(input_shape[0], first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        ]  # fmt: skip
        super().__init__(features, hidden, input_shape, num_classes, dropout)


class LeNet(_Small):
    """LeNet-5 as the classic tutorials have it; 61,706 parameters for 1 x 32 x 32 images, 62,006 for 3 x 32 x 32.

    Source: PyTorch, "Training a Classifier", after LeCun et al. 1998, "Gradient-based learning applied to document
    recognition". `input_shape` is (C, H, W).
    """

    def __init__(self, input_shape: Shape = (3, 32, 32), num_classes: int = 10) -> None:
        features = [
            nn.Conv2d(input_shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        ]  # fmt: skip
        super().__init__(features, ("features.1", "features.4"), input_shape)
        self.classifier = nn.Sequential(
            nn.Linear(16 * self.positions, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )


class MNISTNet(_Small):
    """The net of the MNIST examples, with logits; 21,840 parameters for 1 x 28 x 28 images and ten classes.

    Source: PyTorch's distributed and MNIST examples.

    Args:
        dropout: probability of a zero channel of the second convolution, and of a zero hidden unit.
    """

    def __init__(self, input_shape: Shape = (1, 28, 28), num_classes: int = 10, dropout: float = 0.5) -> None:
        features = [
            nn.Conv2d(input_shape[0], 10, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(10, 20, 5), Dropout(dropout, channels=True), nn.MaxPool2d(2), nn.ReLU(),
        ]  # fmt: skip
        super().__init__(features, ("features.2", "features.6"), input_shape)
        self.classifier = nn.Sequential(
            nn.Linear(20 * self.positions, 50), nn.ReLU(), Dropout(dropout, layer=1), nn.Linear(50, num_classes)
        )
