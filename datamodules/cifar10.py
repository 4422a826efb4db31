"""CIFAR-10, downloaded by torchvision."""

import torchvision.datasets

from datamodules.downloaded import Downloaded, Origin


class CIFAR10(Downloaded):
    """60,000 colour photographs, 32 x 32, of ten classes: 50,000 train, 10,000 test (Krizhevsky, 2009)."""

    source = torchvision.datasets.CIFAR10
    input_shape = (3, 32, 32)
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in the distillation tutorial
    flips = True

    def origin(self) -> Origin:
        """One archive, in `root` itself; torchvision checks the sum of each extracted file."""
        known = torchvision.datasets.CIFAR10
        return Origin([known.url], [(self.root / known.filename, known.tgz_md5)], self.root / known.base_folder)
