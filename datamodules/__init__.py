"""Where samples come from, and which rank sees which of them.

A new data set is a file here and two lines below: for type checkers, and in the table of what is imported when used.
"""

from typing import TYPE_CHECKING

from apprentice.faces import import_when_used

if TYPE_CHECKING:
    from datamodules.base import InMemoryData
    from datamodules.digits import Digits
    from datamodules.hugging_face import HuggingFaceImages
    from datamodules.image_folder import ImageFolder
    from datamodules.image_table import ImageTable
    from datamodules.images import ImageData
    from datamodules.text.chat import Chat
    from datamodules.text.labelled_text import LabelledText, Shakespeare
    from datamodules.text.pairs import Pairs
    from datamodules.text.plain_text import Text
    from datamodules.text.synthetic_tasks import Copying, Needle, Recall
    from datamodules.text.vocabulary import Subwords, Vocabulary, vocabulary_of
    from datamodules.torchvision_data import CIFAR10, CIFAR100, MNIST, FashionMNIST
    from datamodules.transforms import Transforms

MODULES = {
    "InMemoryData": "base",
    "Chat": "text.chat",
    "CIFAR10": "torchvision_data",
    "CIFAR100": "torchvision_data",
    "Copying": "text.synthetic_tasks",
    "Digits": "digits",
    "HuggingFaceImages": "hugging_face",
    "ImageFolder": "image_folder",
    "ImageTable": "image_table",
    "ImageData": "images",
    "LabelledText": "text.labelled_text",
    "MNIST": "torchvision_data",
    "FashionMNIST": "torchvision_data",
    "Needle": "text.synthetic_tasks",
    "Pairs": "text.pairs",
    "Recall": "text.synthetic_tasks",
    "Shakespeare": "text.labelled_text",
    "Subwords": "text.vocabulary",
    "Text": "text.plain_text",
    "Vocabulary": "text.vocabulary",
    "vocabulary_of": "text.vocabulary",
    "Transforms": "transforms",
}

__all__ = list(MODULES)

if not TYPE_CHECKING:
    __getattr__ = import_when_used(__name__, MODULES)
