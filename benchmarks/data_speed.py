"""Images a second from a folder: in memory, read anew, and with torchvision's ImageFolder.

    python benchmarks/data_speed.py                              # about eight minutes on 2 cores
    python benchmarks/data_speed.py --images 500 --large 0 --out FILE

The folder has generated JPEG files of 256 x 256, resized and cropped to `--size`; with the default of 256, nothing is
to resize. `plain` is torchvision's ImageFolder and torch's DataLoader with the same batches, workers and transforms of
torchvision.transforms.v2. A pass over the training set ends with normalised floats. `light` shifts by up to 4 pixels
and mirrors; `heavy` is RandomResizedCrop, RandomHorizontalFlip and ColorJitter. `none` and `plain` have `--workers`;
`memory` has none in `light`, as is its default, and `--workers` in `heavy`.

`waiting` is the share of a training step of a ResNet-18 at 224 in which it waits for images. `peak` is the memory of
the process that trains a small net on `--large` images (hard links to the others), over that for a twentieth of them.
"""

import argparse
import os
import resource
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Rivals, Target
from datamodules import ImageFolder
from datamodules.streams import SampleStream
from harness.runs import environment
from lit_modules.classifier import LitClassifier
from lit_modules.nets import LightNN, Torchvision

SIDE, DISTINCT = 256, 1000  # pixels of a file; images that differ, beyond which files are links
HEAVY: list[Any] = ["RandomResizedCrop", "RandomHorizontalFlip", {"ColorJitter": {"brightness": 0.4, "contrast": 0.4}}]
TARGETS = {
    "none / plain, light": Target("read anew over torchvision, shift and flip", low=1.0),
    "memory / plain, light": Target("in memory over torchvision, shift and flip"),
    "none / plain, heavy": Target("read anew over torchvision, crop, flip and colours", low=1.0),
    "memory / plain, heavy": Target("in memory over torchvision, crop, flip and colours"),
    "waiting": Target("share of a step that waits, ResNet-18, read anew"),
    "peak": Target("peak memory for 20 times as many images", high=1.1),
}


def generate(root: Path, count: int) -> None:
    """Write files of about 25 kB, smooth shapes with some noise: `count` to train, an eighth, at least 10, to test."""
    generator = np.random.default_rng(0)
    originals: list[Path] = []
    for i in range(count + max(10, count // 8)):
        path = root / ("train" if i < count else "test") / f"class{i % count % 10}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i >= DISTINCT:
            os.link(originals[i % DISTINCT], path)
            continue
        shapes = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((SIDE, SIDE))
        noise = generator.integers(-12, 13, (SIDE, SIDE, 3))
        Image.fromarray((np.asarray(shapes) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=85)
        originals.append(path)


def folder(root: Path, cache: str, transforms: str, args: argparse.Namespace) -> ImageFolder:
    light = transforms == "light"
    workers = args.workers if cache == "none" or not light else None
    augmentation: dict[str, Any] = {"augment": True} if light else {"transforms": HEAVY}
    sizes = {"image_size": args.size, "batch_size": args.batch, "validation_size": 0}
    data = ImageFolder(root, cache=cache, num_workers=workers, **sizes, **augmentation)
    data.setup()
    return data


def ours(data: ImageFolder) -> Iterator[Tensor]:
    """Yield normalised batches; augment images in memory here, as on the training device."""
    streamed = isinstance(data.split("train"), SampleStream)
    for batch in data.train_dataloader():
        yield data.normalize(batch.inputs if streamed else data.augmentation(batch.inputs, 0, batch.index))


def plain(root: Path, transforms: str, args: argparse.Namespace) -> Iterator[Tensor]:
    jitter = v2.ColorJitter(brightness=0.4, contrast=0.4)
    light = [v2.RandomCrop(args.size, padding=4), v2.RandomHorizontalFlip()]
    heavy = [v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), jitter]
    resized = [v2.Resize(args.size), v2.CenterCrop(args.size)]
    scaled = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(ImageFolder.mean, ImageFolder.std)]
    steps = v2.Compose([*resized, v2.PILToTensor(), *(light if transforms == "light" else heavy), *scaled])
    images = datasets.ImageFolder(str(root / "train"), steps)
    for batch, _ in DataLoader(images, args.batch, shuffle=True, num_workers=args.workers):
        yield batch


def speeds(root: Path, transforms: str, args: argparse.Namespace) -> Measurement:
    def rate(batches: Any, *options: Any) -> float:
        return args.images / common.seconds(lambda: deque(batches(*options), maxlen=0))

    sides: Rivals = {"plain": partial(rate, plain, root, transforms, args)}
    for cache in ("none", "memory"):
        sides[cache] = partial(rate, ours, folder(root, cache, transforms, args))
    runs = common.take_turns(sides, args.rounds, f"images/s, {transforms}")
    ratios = {
        f"{side} / plain, {transforms}": common.over(runs[side], runs["plain"]) for side in sides if side != "plain"
    }
    return Measurement({f"images/s, {transforms}": runs}, ratios)


def waiting(root: Path, args: argparse.Namespace) -> float:
    """Return the share of a ResNet-18's step that waits for images, read anew."""
    sizes: dict[str, Any] = {"image_size": 224, "batch_size": args.batch // 2, "validation_size": 0}
    data = ImageFolder(root, cache="none", num_workers=args.workers, augment=True, **sizes)
    net = with_seed(0, lambda: Torchvision("resnet18", input_shape=(3, 224, 224), num_classes=10))
    record = common.fit(LitClassifier(net), data, max_steps=args.steps, max_epochs=-1, limit_val_batches=0)
    steps = slice(2, -1)  # the first images are not read ahead, and after the last step the fit ends
    return sum(record["waits"][steps]) / sum(record["steps"][steps])


def peak(root: str, workers: int) -> float:
    """Return the MiB of this process and its largest worker, after an epoch of a small net on a folder."""
    data = ImageFolder(root, 32, cache="none", num_workers=workers, augment=True, batch_size=64, validation_size=0)
    net = with_seed(0, lambda: LightNN(input_shape=(3, 32, 32), num_classes=10))
    record = common.fit(LitClassifier(net), data, max_epochs=1, limit_val_batches=0)
    return record["peak_mib"] + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10


def memory(path: Path, args: argparse.Namespace) -> Measurement:
    runs = {}
    for count in (args.large // 20, args.large):
        generate(path / str(count), count)
        mib = common.call_fresh(peak, str(path / str(count)), args.workers, env=common.thread_variables(None))
        runs[f"{count:,} images"] = [mib]
    few, many = runs.values()
    return Measurement({"MiB, process and largest worker": runs}, {"peak": common.over(many, few)})


def measure(args: argparse.Namespace) -> Measurement:
    with tempfile.TemporaryDirectory() as path:
        parts = [memory(Path(path), args)] if args.large else []  # first: a process begins with its parent's peak
        environment.keep_memory()
        root = Path(path) / "images"
        generate(root, args.images)
        parts += [speeds(root, transforms, args) for transforms in ("light", "heavy")]
        parts.append(Measurement({}, {"waiting": [waiting(root, args)]}))
    return common.merge(parts)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 3), "passes of each side, in turn")
    command.add_argument("--images", type=int, default=2000, help="to train on")
    command.add_argument("--size", type=int, default=256, help="to which images are brought")
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--steps", type=int, default=12, help="of the ResNet-18, at least 4; with half of a batch")
    command.add_argument("--large", type=int, default=100_000, help="images of the measurement of memory; 0 for none")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
