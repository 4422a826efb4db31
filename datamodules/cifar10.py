"""CIFAR-10, downloaded by torchvision."""

from pathlib import Path

import torchvision.datasets

from datamodules.downloaded import Downloaded


class CIFAR10(Downloaded):
    """60,000 colour photographs, 32 x 32, of ten classes: 50,000 train, 10,000 test (Krizhevsky, 2009)."""

    source = torchvision.datasets.CIFAR10
    input_shape = (3, 32, 32)
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in the distillation tutorial
    flips = True

    def archives(self) -> list[tuple[Path, str]]:
        """One, in `root` itself."""
        return [(self.root / torchvision.datasets.CIFAR10.filename, torchvision.datasets.CIFAR10.tgz_md5)]

    def addresses(self) -> list[str]:
        """One."""
        return [torchvision.datasets.CIFAR10.url]

    def files(self) -> Path:
        """The folder in the archive; torchvision checks the sum of each file."""
        return self.root / torchvision.datasets.CIFAR10.base_folder
