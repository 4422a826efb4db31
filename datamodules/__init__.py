"""Where samples come from, and which rank sees which of them."""

from datamodules.base import InMemoryData
from datamodules.digits import Digits
from datamodules.downloaded import CIFAR10, MNIST
from datamodules.folder import ImageFolder
from datamodules.images import ImageData
from datamodules.text import LabelledText, Shakespeare

__all__ = ["CIFAR10", "MNIST", "Digits", "ImageData", "ImageFolder", "InMemoryData", "LabelledText", "Shakespeare"]
