"""MNIST, downloaded by torchvision."""

from pathlib import Path

import torchvision.datasets

from datamodules.downloaded import Downloaded


class MNIST(Downloaded):
    """70,000 handwritten digits, 28 x 28: 60,000 train, 10,000 test (LeCun et al., 1998). `root` holds `MNIST/raw/`."""

    source = torchvision.datasets.MNIST
    input_shape = (1, 28, 28)
    class_names = tuple("0123456789")
    mean, std = (0.1307,), (0.3081,)

    def archives(self) -> list[tuple[Path, str]]:
        """Four of them."""
        return [(self.files() / name, md5) for name, md5 in torchvision.datasets.MNIST.resources]

    def addresses(self) -> list[str]:
        """The mirrors, tried in turn."""
        return torchvision.datasets.MNIST.mirrors

    def files(self) -> Path:
        """Archives and extracted files are in one folder; torchvision checks the sums of the archives only."""
        return self.root / "MNIST" / "raw"
