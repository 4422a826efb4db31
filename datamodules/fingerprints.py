"""Fingerprints of a data set's samples, by which a resumed run checks that they are the same."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from datamodules.splits import Samples
from datamodules.streams import SampleStream

if TYPE_CHECKING:
    from datamodules.image_sources import ImageSource

READ = 2**28  # bytes of files that are read whole: a second or less
SAMPLED = 1024  # files, or streamed samples, that are read of a larger set
ROUNDING = 1e-4  # relative, of a mean: kernels of another processor may round a user's transforms otherwise
TIMES = "times"

Fingerprint = Mapping[str, Any]  # of each part, as JSON has it


def of_samples(samples: Samples | SampleStream) -> str:
    """Hash all labels and inputs; of streamed samples, all labels and `SAMPLED` inputs."""
    if isinstance(samples, SampleStream):
        return of_tensors(samples.labels, samples.take(_spread_places(len(samples.labels), SAMPLED)).inputs)
    return of_tensors(samples.inputs, samples.labels)


def of_tensors(*tensors: Tensor) -> str:
    """Hash tensors with their shapes and types."""
    shapes = repr([(tuple(values.shape), values.dtype) for values in tensors])
    return _hash([shapes.encode(), *map(_buffer, tensors)])


def of_images(images: "ImageSource") -> str | dict[str, str]:
    """Hash names, labels, sizes and content of files; of a set larger than `READ`, the content of `SAMPLED` files.

    Such a set also has a hash of the files' times, a weaker sign: they differ in a copy of the same files.
    """
    sizes, times = images.sizes_and_times().T
    is_small = sizes.sum() <= READ
    places = _spread_places(len(sizes), len(sizes) if is_small else SAMPLED).tolist()
    header = [images.all_names(), sizes.tobytes(), _buffer(images.labels)]
    files = _hash(itertools.chain(header, map(images.content, places)))
    return files if is_small else {"files": files, TIMES: _hash([times.tobytes()])}


def changed_parts(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return the parts, such as `train`, whose samples differ."""
    return [part for part in {**before, **now} if not _same(before.get(part), now.get(part))]


def touched_parts(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return the parts whose files have other times, if not all of their content was read."""
    old_times, new_times = (
        {part: hashes[TIMES] for part, hashes in fingerprint.items() if isinstance(hashes, dict) and TIMES in hashes}
        for fingerprint in (before, now)
    )
    return [part for part in old_times if part in new_times and old_times[part] != new_times[part]]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(key == TIMES or _same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(one == other)


def _spread_places(size: int, count: int) -> Tensor:
    """Return (count,) int64, places spread evenly over `size`; all of them if there are no more."""
    return torch.arange(min(count, size)) * size // max(min(count, size), 1)


def _buffer(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def _hash(parts: Iterable[bytes | memoryview]) -> str:
    key = hashlib.blake2b(digest_size=12)
    for part in parts:
        key.update(len(part).to_bytes(8, "little"))
        key.update(part)
    return key.hexdigest()
