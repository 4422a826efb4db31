"""Groups of images that are equal, or nearly so, which a split should not part."""

import fcntl
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from datamodules.image_sources import ImageSource, with_progress
from datamodules.splits import Split
from datamodules.streams import SampleStream, read_batches

WIDTH, HEIGHT = 9, 8  # of a thumbnail: a hash of 8 x 8 bits
DIGEST = 16  # bytes
MARGIN = 6  # of red, green and blue together, by which a pixel is darker than its neighbour: less is noise
BITS = 7  # of a hash, that may differ
SIMILAR = 24  # levels, of 255, by which each pixel of two thumbnails may differ
CHUNK = 64  # images that a worker decodes at once
SUM = 4  # bytes of a checksum


def recall_near_duplicates(images: ImageSource, workers: int | None, folder: Path) -> Tensor:
    """Return `group_near_duplicates`, which one process works out; others, and later runs, read it in `folder`.

    The file is named after the images and may be deleted. Where none can be written, each process works it out.
    """
    rules = "-".join(map(str, (MARGIN, BITS, SIMILAR)))
    with _lock(folder / f"{_hash_images(images)}-{rules}.groups") as file:
        content = b"" if file is None else file.read()
        if len(content) == SUM + 8 * len(images.labels) and int.from_bytes(content[:SUM]) == zlib.crc32(content[SUM:]):
            return torch.frombuffer(bytearray(content[SUM:]), dtype=torch.int64)
        groups = group_near_duplicates(images, workers)
        if file is not None:
            content = groups.numpy().tobytes()
            with suppress(OSError):
                file.truncate(0)
                file.write(zlib.crc32(content).to_bytes(SUM) + content)
                file.flush()
        return groups


def _hash_images(images: ImageSource) -> str:
    """Hash what determines the pixels of images: their sources and Pillow's version."""
    key = hashlib.blake2b(PIL.__version__.encode(), digest_size=12)
    for part in images.cache_key():
        key.update(part)
    return key.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[BinaryIO | None]:
    """The file, made if it is not there, for this process alone; None if it can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError:
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a network's disk without locks
            yield None
            return
        file.seek(0)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: forked workers may have the file open, too


def group_near_duplicates(images: ImageSource, workers: int | None) -> Tensor:
    """Return (n,) int64, the number of each image's group, of images that are linked by equality or near equality.

    Images are equal if all of their pixels are, before resizing. They are nearly equal if no pixel of their thumbnails,
    9 x 8 in RGB, differs by more than `SIMILAR` levels, and at most `BITS` bits of a hash of 64 do: whether a pixel of
    the thumbnail is darker than the one to its right (dHash; N. Krawetz, "Kind of Like That", 2013). That covers the
    same picture in another size, quality or format; not a crop, a mirror image or another picture of a scene. Of 1,000
    images of CIFAR-10, 89 % at JPEG quality 40 and 97 % at three quarters of the size are nearly equal to the original;
    of its 60,000 images, 72 are to another one, and the pairs that were looked at are of one class. BadInput if an
    image can't be read.
    """
    places = torch.arange(len(images.labels))
    chunks = read_batches(SampleStream(_Look(images), workers), places.split(CHUNK))
    seen = torch.cat([split.inputs for split in with_progress(chunks, len(places), CHUNK)]).numpy()
    _, first, equal = np.unique(seen[:, :DIGEST], axis=0, return_index=True, return_inverse=True)
    thumbnails = seen[first, DIGEST:].reshape(-1, HEIGHT, WIDTH, 3)
    pairs = np.concatenate([np.empty((2, 0), np.int64), *_near_pairs(thumbnails)], axis=1)
    links = coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), shape=(len(first), len(first)))
    return torch.from_numpy(connected_components(links, directed=False)[1][equal.ravel()].astype(np.int64))


def repeated_values(groups: Tensor) -> list[int]:
    """Return the numbers of groups (n,) that have several members."""
    numbers, counts = groups.unique(return_counts=True)
    return numbers[counts > 1].tolist()


def _near_pairs(thumbnails: np.ndarray) -> Iterator[np.ndarray]:
    """Yield (2, p) int64, pairs of nearly equal thumbnails (n, 8, 9, 3), at most 8 n, which link all that are."""
    grey = thumbnails.sum(-1, dtype=np.int16)
    bits = np.packbits(grey[:, :, 1:] - grey[:, :, :-1] > MARGIN).reshape(-1, 8)
    hashes = bits.view(np.uint64)[:, 0]  # (n,)
    levels = thumbnails.reshape(len(thumbnails), -1).astype(np.int16)
    for band in bits.T:  # (n,), of hashes that differ in at most 7 bits one of 8 bytes is equal
        order = band.argsort(kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(band[order])) + 1):
            others, linked = members, list[int]()
            while len(others):  # a spanning tree of each component: all pairs of many similar images would fill memory
                if linked:
                    member = linked.pop()
                else:
                    member, others = int(others[0]), others[1:]
                near = np.flatnonzero(np.bitwise_count(hashes[others] ^ hashes[member]) <= BITS)
                near = near[np.abs(levels[others[near]] - levels[member]).max(1) <= SIMILAR]
                if len(near):
                    yield np.stack([np.full(len(near), member), others[near]])
                    linked += others[near].tolist()
                    others = np.delete(others, near)


class _Look(NamedTuple):
    """A source that gives digests and thumbnails of images in place of their pixels."""

    images: ImageSource

    @property
    def labels(self) -> Tensor:
        return self.images.labels

    def take(self, chosen: Tensor) -> Split:
        """Return (k, 16 + 216) uint8, of each image the digest and the thumbnail, and the labels."""
        return Split(
            torch.stack([_look(self.images.decode_upright(place)) for place in chosen.tolist()]), self.labels[chosen]
        )


def _look(image: Image.Image) -> Tensor:
    digest = hashlib.blake2b(f"{image.size}".encode(), digest_size=DIGEST)
    digest.update(image.tobytes())
    thumbnail = image.resize((WIDTH, HEIGHT), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(digest.digest() + thumbnail.tobytes()), dtype=torch.uint8)
