"""Where samples come from, and which rank sees which of them. A new data set is a file here and a line below."""

from datamodules.base import InMemoryData
from datamodules.chat import Chat
from datamodules.cifar10 import CIFAR10, CIFAR100
from datamodules.copying import Copying
from datamodules.digits import Digits
from datamodules.hugging_face import HuggingFaceImages
from datamodules.image_folder import ImageFolder
from datamodules.image_table import ImageTable
from datamodules.images import ImageData
from datamodules.labelled_text import LabelledText
from datamodules.mnist import MNIST, FashionMNIST
from datamodules.needle import Needle
from datamodules.recall import Recall
from datamodules.shakespeare import Shakespeare
from datamodules.text import Subwords, Text, Vocabulary, vocabulary_of
from datamodules.transforms import Transforms
