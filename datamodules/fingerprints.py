"""What tells a data set from another: a fingerprint of its samples, by which a run that goes on knows them again."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.encoded import Encoded
from datamodules.splits import Samples
from datamodules.streams import Streamed

READ = 2**28  # bytes of files that are read whole: a second or less
SAMPLED = 1024  # files, or streamed samples, that are read of a larger set
ROUNDING = 1e-4  # relative, of a mean: kernels of another processor may round a user's transforms otherwise

Fingerprint = Mapping[str, Any]  # of each part, as JSON has it


def of_samples(samples: Samples | Streamed) -> str:
    """Of all labels and inputs; of streamed ones, all labels and as many inputs as `SAMPLED`."""
    if isinstance(samples, Streamed):
        return of_tensors(samples.labels, samples.take(_spread(len(samples.labels), SAMPLED)).inputs)
    return of_tensors(samples.inputs, samples.labels)


def of_tensors(*tensors: Tensor) -> str:
    """Of tensors with their shapes and types."""
    shapes = repr([(tuple(values.shape), values.dtype) for values in tensors])
    return _hash([shapes.encode(), *map(_buffer, tensors)])


def of_images(images: Encoded) -> str:
    """Of names, labels, sizes and content of files; of a set larger than `READ`, the content of `SAMPLED` of them.

    Times don't count: a copy of the same files has others, and a changed file may have the old one. So a change of few
    files of a large set is not noticed if names and sizes are the same.
    """
    sizes = images.byte_sizes()
    count = len(sizes) if sizes.sum() <= READ else min(SAMPLED, len(sizes))
    content = (images.content(place) for place in _spread(len(sizes), count).tolist())
    return _hash(itertools.chain([images.all_names(), sizes.tobytes(), _buffer(images.labels)], content))


def differing(before: Fingerprint, now: Fingerprint) -> list[str]:
    """The parts, such as `train`, whose samples are others."""
    return [part for part in {**before, **now} if not _same(before.get(part), now.get(part))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(one == other)


def _spread(size: int, count: int) -> Tensor:
    """(count,) int64, places spread evenly over `size`; all of them if there are no more."""
    return torch.arange(min(count, size)) * size // max(min(count, size), 1)


def _buffer(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def _hash(parts: Iterable[bytes | memoryview]) -> str:
    key = hashlib.blake2b(digest_size=12)
    for part in parts:
        key.update(len(part).to_bytes(8, "little"))
        key.update(part)
    return key.hexdigest()
