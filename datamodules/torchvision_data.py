"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100: torchvision downloads and reads them, with its checksums."""

import contextlib
import http.client
import io
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision.datasets
from torchvision.datasets import VisionDataset
from torchvision.datasets.utils import calculate_md5

from apprentice.errors import BadInput
from datamodules.images import IMAGENET, ImageData
from datamodules.splits import Split

PATIENCE = 9.0  # a download is abandoned after so many seconds without a byte, at the latest after twice as many
FETCHING = (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error)
READING = (OSError, RuntimeError, EOFError, ValueError, AssertionError, TypeError, KeyError, IndexError)


class Origin(NamedTuple):
    """Addresses of a data set, its archives with MD5 sums, and the folder of the extracted files."""

    addresses: list[str]
    archives: list[tuple[Path, str]]
    files: Path


class TorchvisionData(ImageData):
    """A data set that a class of torchvision, `source`, downloads and reads.

    Args:
        root: the folder that holds the data, or to which they are downloaded.
        options: those of ImageData.

    Raises:
        BadInput: the files in `root` are damaged, or absent and can't be downloaded.
    """

    source: type[VisionDataset]
    free_options = ImageData.free_options | {"root"}

    def __init__(self, root: str | Path = "data", **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root).expanduser()

    def origin(self) -> Origin:
        """Return where torchvision downloads the data from, and where it looks for them."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Download and extract the data unless they are there; Lightning calls this in one process of each machine."""
        if self._splits or self._open("test") is not None:
            return
        files = self.origin().files
        self._check_level(files)
        absent = [folder for folder in (files, *files.parents) if not folder.exists()]
        try:
            targets = [files, *(path for path, _ in self.origin().archives)]
            fetch(lambda: self.source(self.root, train=False, download=True), targets)
        except FETCHING as error:
            for folder in absent:
                with contextlib.suppress(OSError):  # it is not there, or holds a part of the download
                    folder.rmdir()
            raise BadInput("data.root", self.root, self._remedy(error)) from error

    def _check_level(self, files: Path) -> None:
        """Raise BadInput if `root` is the folder of the data, or one in it, and not the folder that holds it."""
        inside, root = files.relative_to(self.root), self.root.absolute()
        for around in root.parents[: len(inside.parts)]:
            if (around / inside).is_dir() and (around / inside.parts[0]) in (root, *root.parents):
                raise BadInput("data.root", self.root, f"{around}, the folder that holds {inside.parts[0]}")

    def read(self) -> tuple[Split, Split]:
        """Read both sets whole; 0.2 GB for CIFAR-10."""
        return self._read("train"), self._read("test")

    def _open(self, part: str) -> Any:
        try:
            return self.source(self.root, train=part == "train")
        except READING as error:
            if "download=True" in str(error):  # torchvision's words for absent or unexpected files
                return None
            raise self._damaged_files_error(error) from error

    def _read(self, part: str) -> Split:
        dataset = self._open(part)
        if dataset is None:
            raise BadInput("data.root", self.root, f"{self.name} in {self.origin().files}; prepare_data() downloads it")
        images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets).long()
        images = images.movedim(-1, 1) if images.dim() == 4 else images[:, None]
        if images.shape[1:] != self.input_shape or len(images) != len(labels) or labels.max() >= self.num_classes:
            raise self._damaged_files_error(ValueError(f"{tuple(images.shape)} images, {len(labels)} labels"))
        return Split(images.contiguous(), labels)

    def _damaged_files_error(self, error: Exception) -> BadInput:
        return BadInput(
            "data.root", self.root,
            f"intact files of {self.name}; those in {self.origin().files} are damaged ({_one_line(error)}): "
            "delete that folder, and they are extracted or downloaded again",
        )  # fmt: skip

    def _remedy(self, error: Exception) -> str:
        addresses, archives, _ = self.origin()
        names = " and ".join(filter(None, [", ".join(p.name for p, _ in archives[:-1]), archives[-1][0].name]))
        corrupt = [
            f"{path} is corrupt or incomplete (its MD5 sum is {actual}, not {md5})"
            for path, md5 in archives
            if path.is_file() and (actual := calculate_md5(path)) != md5
        ]
        return (
            f"{self.name} there; it is not, and downloading it from {' or '.join(addresses)} failed: "
            f"{'; '.join(corrupt) or _one_line(error)}. Put {names} into {archives[0][0].parent.absolute()}, "
            "or take `data Digits`, which needs no download"
        )


class MNIST(TorchvisionData):
    """70,000 handwritten digits, 28 x 28: 60,000 train, 10,000 test (LeCun et al., 1998). `root` holds `MNIST/raw/`."""

    source: type[torchvision.datasets.MNIST] = torchvision.datasets.MNIST
    input_shape = (1, 28, 28)
    class_names = tuple("0123456789")
    mean, std = (0.1307,), (0.3081,)

    def origin(self) -> Origin:
        """Four archives, in one folder with the extracted files; torchvision checks the archives' sums only."""
        folder = self.root / self.source.__name__ / "raw"
        return Origin(self.source.mirrors, [(folder / name, md5) for name, md5 in self.source.resources], folder)


class FashionMNIST(MNIST):
    """70,000 grey pictures of clothing, 28 x 28: 60,000 train, 10,000 test (Xiao et al., 2017)."""

    source = torchvision.datasets.FashionMNIST
    class_names = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    mean, std = (0.2860,), (0.3530,)  # of the 60,000
    flips = True


class CIFAR10(TorchvisionData):
    """60,000 colour photographs, 32 x 32, of ten classes: 50,000 train, 10,000 test (Krizhevsky, 2009)."""

    source: type[torchvision.datasets.CIFAR10] = torchvision.datasets.CIFAR10
    input_shape = (3, 32, 32)
    class_names: tuple[str, ...] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    mean, std = IMAGENET  # as in the distillation tutorial
    flips = True

    def origin(self) -> Origin:
        """One archive, in `root` itself; torchvision checks the sum of each extracted file."""
        source = self.source
        return Origin([source.url], [(self.root / source.filename, source.tgz_md5)], self.root / source.base_folder)


class CIFAR100(CIFAR10):
    """60,000 colour photographs, 32 x 32, of a hundred classes: 50,000 train, 10,000 test (Krizhevsky, 2009)."""

    source = torchvision.datasets.CIFAR100
    class_names = tuple(
        """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
        can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
        dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
        lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter
        palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
        rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower
        sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
        willow_tree wolf woman worm
        """.split()  # noqa: SIM905 - a hundred strings are no list that one reads
    )
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)  # as in RepDistiller


def fetch(download: Callable[[], object], targets: Sequence[Path]) -> None:
    """Run `download` in a thread, with its progress bars on a terminal only.

    Abandons it with a TimeoutError when nothing is written to the targets for PATIENCE seconds: a timeout of sockets
    would apply to each address of a name in turn, and not to the lookup of the name.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            download()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it again
            raised.append(error)

    worker = threading.Thread(target=run, daemon=True)  # so that a stalled one does not keep the process from ending
    with contextlib.ExitStack() as quiet:
        if not sys.stderr.isatty():
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        worker.start()
        while worker.is_alive():
            before = _count_bytes(targets)
            worker.join(PATIENCE)
            if worker.is_alive() and _count_bytes(targets) == before:
                raise TimeoutError(f"timed out: nothing came for {PATIENCE:g} seconds")
    if raised:
        raise raised[0]


def _count_bytes(targets: Sequence[Path]) -> int:
    paths = (path for target in targets for path in (target, *target.rglob("*")))
    return sum(path.stat().st_size for path in paths if path.is_file())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
