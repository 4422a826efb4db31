"""MNIST and CIFAR-10 over torchvision's loaders, which know the addresses and checksums; downloaded when absent."""

import http.client
import tarfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torchvision.datasets
from torchvision.datasets.utils import calculate_md5

from apprentice.errors import BadInput
from datamodules.download import fetch
from datamodules.images import ImageData
from datamodules.splits import Split

FETCHING = (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error)
READING = (OSError, RuntimeError, EOFError, ValueError, AssertionError, TypeError, KeyError, IndexError)


class Downloaded(ImageData):
    """A data set that one of torchvision's classes fetches and reads.

    Attributes:
        source: that class.

    Args:
        root: the folder that holds the data or gets it.
        options: those of ImageData.

    Raises:
        BadInput: what is in `root` is damaged, or it is absent and can't be downloaded.
    """

    source: type[torchvision.datasets.VisionDataset]
    free_options = ImageData.free_options | {"root"}

    def __init__(self, root: str | Path = "data", **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root).expanduser()

    def archives(self) -> list[tuple[Path, str]]:
        """Where torchvision looks for the downloaded archives, and their MD5 sums."""
        raise NotImplementedError

    def addresses(self) -> list[str]:
        """Where they are downloaded from."""
        raise NotImplementedError

    def files(self) -> Path:
        """The folder of the extracted files."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Download and extract, unless that is done; Lightning calls this in one process of each machine."""
        if self._splits or self._open("test") is not None:
            return
        try:
            fetch(
                lambda: self.source(self.root, train=False, download=True),
                [self.files(), *(path for path, _ in self.archives())],
            )
        except FETCHING as error:
            raise BadInput("data.root", self.root, self._remedy(error)) from error

    def read(self) -> tuple[Split, Split]:
        """Both sets whole; 0.2 GB for CIFAR-10."""
        return self._read("train"), self._read("test")

    def _open(self, part: str) -> Any:
        """Torchvision's data set, or None if it is not there."""
        try:
            return self.source(self.root, train=part == "train")
        except READING as error:
            if "download=True" in str(error):  # so torchvision says that it is absent, or not what it should be
                return None
            raise self._damaged(error) from error

    def _read(self, part: str) -> Split:
        dataset = self._open(part)
        if dataset is None:
            raise BadInput("data.root", self.root, f"{self.name} in {self.files()}; prepare_data() downloads it")
        images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets).long()
        images = images.movedim(-1, 1) if images.dim() == 4 else images[:, None]
        if images.shape[1:] != self.input_shape or len(images) != len(labels) or labels.max() >= self.num_classes:
            raise self._damaged(ValueError(f"{tuple(images.shape)} images, {len(labels)} labels"))
        return Split(images.contiguous(), labels)

    def _damaged(self, error: Exception) -> BadInput:
        return BadInput(
            "data.root", self.root,
            f"intact files of {self.name}; those in {self.files()} are damaged ({_one_line(error)}): "
            "delete that folder, and they are extracted or downloaded again",
        )  # fmt: skip

    def _remedy(self, error: Exception) -> str:
        archives = self.archives()
        names = _listed([path.name for path, _ in archives])
        corrupt = [
            f"{path} is corrupt or incomplete (its MD5 sum is {found}, not {md5})"
            for path, md5 in archives
            if path.is_file() and (found := calculate_md5(path)) != md5
        ]
        return (
            f"{self.name} there; it is not, and downloading it from {' or '.join(self.addresses())} failed: "
            f"{'; '.join(corrupt) or _one_line(error)}. Put {names} into {archives[0][0].parent.absolute()}, "
            "or take --data Digits, which needs no download"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


class MNIST(Downloaded):
    """70,000 handwritten digits, 28 x 28: 60,000 train, 10,000 test (LeCun et al., 1998). `root` holds `MNIST/raw/`."""

    source = torchvision.datasets.MNIST
    input_shape = (1, 28, 28)
    class_names = tuple("0123456789")
    mean, std = (0.1307,), (0.3081,)

    def __init__(self, root: str | Path = "data", **options: Any) -> None:
        super().__init__(root, **options)

    def archives(self) -> list[tuple[Path, str]]:
        """Four of them."""
        return [(self.files() / name, md5) for name, md5 in torchvision.datasets.MNIST.resources]

    def addresses(self) -> list[str]:
        """The mirrors, tried in turn."""
        return torchvision.datasets.MNIST.mirrors

    def files(self) -> Path:
        """Archives and extracted files lie together; torchvision checks the sums of the former only."""
        return self.root / "MNIST" / "raw"


class CIFAR10(Downloaded):
    """60,000 colour photographs, 32 x 32, of ten classes: 50,000 train, 10,000 test (Krizhevsky, 2009)."""

    source = torchvision.datasets.CIFAR10
    input_shape = (3, 32, 32)
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as the distillation tutorial has them
    flips = True

    def __init__(self, root: str | Path = "data", **options: Any) -> None:
        super().__init__(root, **options)

    def archives(self) -> list[tuple[Path, str]]:
        """One, in `root` itself."""
        return [(self.root / torchvision.datasets.CIFAR10.filename, torchvision.datasets.CIFAR10.tgz_md5)]

    def addresses(self) -> list[str]:
        """One."""
        return [torchvision.datasets.CIFAR10.url]

    def files(self) -> Path:
        """The folder that the archive holds; torchvision checks the sum of each file."""
        return self.root / torchvision.datasets.CIFAR10.base_folder
