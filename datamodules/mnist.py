"""MNIST, downloaded by torchvision."""

import torchvision.datasets

from datamodules.downloaded import Downloaded, Origin


class MNIST(Downloaded):
    """70,000 handwritten digits, 28 x 28: 60,000 train, 10,000 test (LeCun et al., 1998). `root` holds `MNIST/raw/`."""

    source = torchvision.datasets.MNIST
    input_shape = (1, 28, 28)
    class_names = tuple("0123456789")
    mean, std = (0.1307,), (0.3081,)

    def origin(self) -> Origin:
        """Four archives, in one folder with the extracted files; torchvision checks the sums of the archives only."""
        folder, known = self.root / "MNIST" / "raw", torchvision.datasets.MNIST
        return Origin(known.mirrors, [(folder / name, md5) for name, md5 in known.resources], folder)
