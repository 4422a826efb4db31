"""Where samples come from, and which rank sees which of them."""

from datamodules.base import ImageData
from datamodules.digits import Digits
from datamodules.downloaded import CIFAR10, MNIST
from datamodules.folder import ImageFolder

__all__ = ["CIFAR10", "MNIST", "Digits", "ImageData", "ImageFolder"]
