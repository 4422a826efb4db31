"""The base class of image sets that may not fit in memory: kept there, or read while training."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules import fingerprints, memory
from datamodules.data_hooks import LIMITS
from datamodules.fingerprints import Fingerprint
from datamodules.image_sources import DamagedImage, ImageSource
from datamodules.images import IMAGENET, ImageData
from datamodules.near_duplicates import recall_near_duplicates, repeated_values
from datamodules.splits import Samples, Source, Split
from datamodules.streams import SampleStream, check_workers, read_batches

Cache = Literal["memory", "none"]
OnError = Literal["stop", "skip"]
Sets = dict[str, Any]  # of ImageSource: train, test, and perhaps validation
FOLDER = ".apprentice"  # of near duplicates, beside the images
CHECKED = 64  # images that a worker checks at once


class StoredImages(ImageData):
    """Images that are decoded to RGB, only those of the chosen subset.

    They are turned upright by their EXIF tags. Greys of 16 bits, and floats from 0 to 1, are scaled to 8 bits.

    Args:
        image_size: resize the short side of each image to so many pixels, and crop the centre. Required unless all
            images have one size.
        cache: where decoded images are kept: in `memory`; or nowhere, `none`: then they are decoded at each use.
            Default: in memory if they fit, otherwise nowhere. Results do not depend on it.
        cache_dir: the folder of the groups of near duplicates; default: `.apprentice` beside the images. It may be
            deleted.
        num_workers: processes for each device that read, and augment, ahead; with `memory`, that only augment. Default:
            this machine's cores over its devices, and none with `memory`. Results do not depend on it.
        on_error: at an image that can't be read `stop` the run; or check all images before training, in one pass, and
            `skip` those that can't be read, counted in a line.
        group_duplicates: where the test set is drawn, because there is none: keep images that are equal, or nearly so
            (`datamodules.near_duplicates`), in one part, for which all are decoded once before; later runs read the
            groups in `cache_dir`.
        options: those of ImageData; `mean` and `std` are ImageNet's by default.

    Raises:
        BadInput: an image can't be read, or the images do not fit in memory.
    """

    mean, std = IMAGENET
    flips = True
    free_options = ImageData.free_options | {"cache", "cache_dir"}

    def __init__(
        self,
        image_size: int | None = None,
        *,
        cache: Cache | None = None,
        cache_dir: str | Path | None = None,
        num_workers: int | None = None,
        on_error: OnError = "stop",
        group_duplicates: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if image_size is not None and image_size < 1:
            raise BadInput("data.image_size", image_size, "at least 1 pixel")
        if cache not in {None, *get_args(Cache)}:
            raise BadInput("data.cache", cache, " or ".join(get_args(Cache)))
        if on_error not in get_args(OnError):
            raise BadInput("data.on_error", on_error, " or ".join(get_args(OnError)))
        check_workers(num_workers, "data.num_workers")
        self.image_size, self.cache, self.num_workers, self.on_error = image_size, cache, num_workers, on_error
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        self.group_duplicates = group_duplicates
        self._encoded: list[ImageSource] = []  # of train, validation and test

    def images_folder(self) -> Path:
        """Return the folder of the images, which by default holds `cache_dir`."""
        raise NotImplementedError

    def prepare_sets(self, sets: Sets, skipped: Counter[str], place: object) -> tuple[ImageSource, ...]:
        """Return the sets for `read`: images of one size and, with `on_error` skip, readable; say what is skipped."""
        if self.on_error == "skip":
            sets = {part: self._without_damaged(part, images, skipped) for part, images in sets.items()}
        first, size = sets["train"].name(0), sets["train"].first_size()
        sets = {part: replace(images, first=first, size=size) for part, images in sets.items()}
        self.input_shape = (3, *size)
        if skipped:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(skipped.items()))
            self.say(f"skipped in {place}: {counts}")
        return tuple(sets.values())

    def _without_damaged(self, part: str, images: ImageSource, skipped: Counter[str]) -> ImageSource:
        """Read all images and return those that can be read; raise BadInput if none can."""
        places = torch.arange(len(images.labels))
        checks = read_batches(SampleStream(_Check(images), self.num_workers), places.split(CHECKED))
        readable = torch.cat([split.inputs for split in checks])
        if damaged := int((~readable).sum()):
            skipped.update({"damaged": damaged})
        if damaged == len(readable):
            raise BadInput("data.on_error", self.on_error, f"images of {part} that can be read; none of {damaged} can")
        return images.part(readable.nonzero().flatten())

    def near_duplicates(self, source: Source) -> Tensor | None:
        """Group near duplicates, and say how many there are; None with `group_duplicates` false."""
        if not self.group_duplicates:
            return None
        images = cast("ImageSource", source)
        groups = recall_near_duplicates(images, self.num_workers, self.cache_dir or self.images_folder() / FOLDER)
        members = [(groups == group).nonzero().flatten() for group in repeated_values(groups)]
        if members:
            count = sum(map(len, members))
            self.say(f"near duplicates: images {count}, groups {len(members)}, each kept in one part")
        mixed = [group for group in members if len(images.labels[group].unique()) > 1]
        if mixed:
            first, *others = mixed[0].tolist()
            other = next(place for place in others if images.labels[place] != images.labels[first])
            pair = f"{images.short_name(first)} and {images.short_name(other)}"
            self.say(f"near duplicates in several classes: groups {len(mixed)}, such as {pair}")
        return groups

    def split_list(self) -> list[tuple[str, ...]]:
        """Return part, name and true class of each image if the test set is drawn; with noise also the trained one."""
        self.split("train")
        if not self.test_is_drawn:
            return []
        truth = (self._true_labels, *(images.labels for images in self._encoded[1:]))
        columns = 2 if self.label_noise else 1
        return [
            (part, images.short_name(place), *(self.class_names[label] for label in labels[:columns]))
            for part, images, true in zip(LIMITS, self._encoded, truth, strict=True)
            for place, labels in enumerate(torch.stack([true, images.labels], 1).tolist())
        ]

    def check_fits(self, count: int) -> None:
        """Choose where images are kept, unless set; raise BadInput if they are to be in memory and do not fit."""
        need, have = count * int(np.prod(self.input_shape)), memory.available_bytes()
        if need > have and self.cache in {None, "memory"}:
            size = "x".join(map(str, self.input_shape))
            sizes = f"{count} of {size} take {need / 1e9:.2f} GB, {have / 1e9:.2f} GB are available"
            if self.cache == "memory":
                advice = "give `data.cache none`, a smaller `data.image_size`, `data.train_size` or `data.test_size`"
                raise BadInput("data.cache", self.cache, f"images that fit in memory: {sizes}; {advice}")
            self.say(f"images are read while training (cache none): {sizes}")
            self.cache = "none"

    def hold(self, source: Source, places: Tensor) -> Samples | SampleStream:
        """Return decoded images, or encoded ones that are read while training."""
        images = cast("ImageSource", source)
        self._encoded.append(images.part(places))
        if self.cache == "none":
            return SampleStream(self._encoded[-1], self.num_workers)
        decoded = images.take(places)
        return SampleStream(decoded, self.num_workers) if self.num_workers else decoded

    def names_of(self, part: str, kind: str) -> list[str] | None:
        if kind != "file_name":
            return None
        self.split("train")
        images = self._encoded[[*LIMITS].index(part)]
        return [images.short_name(place) for place in range(len(images.labels))]

    def fingerprint(self) -> Fingerprint:
        """Hash the images as stored; decoded pixels depend on this machine's libraries."""
        self.split("train")
        return {part: fingerprints.of_images(images) for part, images in zip(LIMITS, self._encoded, strict=True)}


class _Check(NamedTuple):
    """A source that tells whether images can be read, in place of their pixels."""

    images: ImageSource

    @property
    def labels(self) -> Tensor:
        return self.images.labels

    def take(self, chosen: Tensor) -> Split:
        """Return (k,) bool, whether each image can be read, and the labels."""
        return Split(torch.tensor([self._is_readable(place) for place in chosen.tolist()]), self.labels[chosen])

    def _is_readable(self, place: int) -> bool:
        try:
            self.images.decode(place)
        except DamagedImage:
            return False
        return True
