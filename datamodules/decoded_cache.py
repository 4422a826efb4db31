"""Decoded images in a file, each written once, with a checksum, and read at the speed of the disk's cache."""

import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.image_sources import ImageSource, with_progress
from datamodules.splits import Split
from datamodules.streams import SampleStream, read_batches

CHUNK = 64  # images that a worker decodes at once
SUM = np.dtype("<u4")  # of a checksum


class DecodedCache:
    """Images of `encoded` at `places` (k,), decoded into a file in `folder` by this process or an earlier one.

    The file's name is a hash of what determines its bytes, so runs with other subsets share it. It has a CRC-32 (n,) of
    each image, 0 if it is not decoded yet, then their pixels (n, 3, H, W) uint8; it is sparse. It is read and not
    mapped: a mapping counts as memory of the process, and would end it if the file were cut short. An image without its
    checksum is decoded again, by so many `workers`, or this machine's cores.

    Raises:
        BadInput: an image can't be read, or the file can't be written.
    """

    def __init__(self, encoded: ImageSource, places: Tensor, folder: Path, workers: int | None = None) -> None:
        self.encoded, self.places, self.labels = encoded, places, encoded.labels[places]
        self.shape, self.path = (3, *encoded.size), folder / f"{name_cache(encoded)}.decoded"
        with self._open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            sums = np.zeros(len(encoded.labels), SUM)
            os.preadv(file, [sums.data], 0)
            missing = places[torch.from_numpy(sums[places.numpy()] == 0)]
            need, free = len(missing) * int(np.prod(self.shape)), shutil.disk_usage(folder).free
            if need > free:
                expected = (
                    f"a folder on a disk with room for {need / 1e9:.2f} GB of images; {free / 1e9:.2f} GB are free"
                )
                raise BadInput("data.cache_dir", folder, expected)
            places_of_chunks = missing.split(CHUNK)
            chunks = zip(places_of_chunks, read_batches(SampleStream(encoded, workers), places_of_chunks), strict=True)
            for slots, split in with_progress(chunks, len(missing), CHUNK):
                for slot, pixels in zip(slots.tolist(), split.inputs.numpy(), strict=True):
                    sums[slot] = self._write(file, slot, pixels)
        self.sums = sums[places.numpy()]

    def take(self, chosen: Tensor) -> Split:
        """Read images (k, 3, H, W) uint8 at places (k,); raise BadInput if one is damaged here and at its origin."""
        images = torch.empty(len(chosen), *self.shape, dtype=torch.uint8)
        with self._open() as file:
            for pixels, place in zip(images.numpy(), chosen.tolist(), strict=True):
                slot = int(self.places[place])
                whole = os.preadv(file, [pixels], self._start(slot)) == pixels.nbytes
                if not whole or zlib.crc32(pixels) != self.sums[place]:
                    pixels[:] = self.encoded.take(torch.tensor([slot])).inputs[0].numpy()
                    self.sums[place] = self._write(file, slot, pixels)
        return Split(images, self.labels[chosen])

    def _write(self, file: int, slot: int, pixels: np.ndarray) -> int:
        """Write the pixels first: an image whose writing is interrupted has no checksum, or a wrong one."""
        total = zlib.crc32(pixels.data)
        _write_all(file, pixels.tobytes(), self._start(slot))
        _write_all(file, np.array(total, SUM).tobytes(), slot * SUM.itemsize)
        return total

    def _start(self, slot: int) -> int:
        return len(self.encoded.labels) * SUM.itemsize + slot * int(np.prod(self.shape))

    @contextmanager
    def _open(self) -> Iterator[int]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                yield file
            finally:
                os.close(file)
        except OSError as error:
            expected = f"a folder that can be written, on a disk with room for the images; {error.strerror}"
            raise BadInput("data.cache_dir", self.path.parent, expected) from error


def name_cache(encoded: ImageSource) -> str:
    """Hash what determines the bytes of decoded images: their sources, their size, Pillow's version."""
    key = hashlib.blake2b(f"{PIL.__version__} {encoded.image_size} {encoded.size}".encode(), digest_size=12)
    for part in encoded.cache_key():
        key.update(part)
    return key.hexdigest()


def _write_all(file: int, content: bytes, start: int) -> None:
    while content:  # a disk that fills up takes a part
        count = os.pwrite(file, content, start)
        content, start = content[count:], start + count
