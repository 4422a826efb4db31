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
TIMES = "times"

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


def of_images(images: Encoded) -> str | dict[str, str]:
    """Of names, labels, sizes and content of files; of a set larger than `READ`, the content of `SAMPLED` of them.

    Such a set has a fingerprint of the files' times beside that. These tell less: a copy of the same files has others.
    """
    sizes, times = images.sizes_and_times().T
    is_small = sizes.sum() <= READ
    places = _spread(len(sizes), len(sizes) if is_small else SAMPLED).tolist()
    described = [images.all_names(), sizes.tobytes(), _buffer(images.labels)]
    files = _hash(itertools.chain(described, map(images.content, places)))
    return files if is_small else {"files": files, TIMES: _hash([times.tobytes()])}


def differing(before: Fingerprint, now: Fingerprint) -> list[str]:
    """The parts, such as `train`, whose samples are others."""
    return [part for part in {**before, **now} if not _same(before.get(part), now.get(part))]


def touched(before: Fingerprint, now: Fingerprint) -> list[str]:
    """The parts whose files have other times, if not all of their content was read."""
    found = (fingerprint.items() for fingerprint in (before, now))
    one, other = ({part: of[TIMES] for part, of in each if isinstance(of, dict) and TIMES in of} for each in found)
    return [part for part in one if part in other and one[part] != other[part]]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(key == TIMES or _same(one[key], other[key]) for key in one)
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
