"""CIFAR-10 and CIFAR-100, downloaded by torchvision."""

import torchvision.datasets

from datamodules.images import IMAGENET
from datamodules.torchvision_data import Origin, TorchvisionData


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
