"""MNIST and Fashion-MNIST, downloaded by torchvision."""

import torchvision.datasets

from datamodules.torchvision_data import Origin, TorchvisionData


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
