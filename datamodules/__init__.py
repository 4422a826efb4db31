"""Where samples come from, and which rank sees which of them."""

from datamodules.base import InMemoryData
from datamodules.digits import Digits
from datamodules.downloaded import CIFAR10, MNIST
from datamodules.folder import ImageFolder
from datamodules.images import ImageData
from datamodules.labelled_text import LabelledText, Shakespeare
from datamodules.text import Text
from datamodules.vocabulary import Vocabulary

__all__ = [
    "CIFAR10", "MNIST", "Digits", "ImageData", "ImageFolder", "InMemoryData", "LabelledText", "Shakespeare", "Text",
    "Vocabulary",
]  # fmt: skip
