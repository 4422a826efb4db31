"""How raw samples become inputs of a net: recorded in net.yaml, and done again to files that no data module reads."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

Kind = Literal["images", "bytes", "tensors"]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How raw samples become a net's inputs.

    Args:
        kind: `images`, in RGB or grey; `bytes` of a text in UTF-8, then zeros; `tensors` that a data module makes in a
            way of its own, such as tokens, which are not known here.
        shape: of one input: (C, H, W), or (T,) tokens.
        mean: of each channel of images, on a scale from 0 to 1.
        std: standard deviation of each channel, likewise.
    """

    kind: Kind
    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_plain` wrote; TypeError, ValueError or LookupError if it is something else."""
        if facts["kind"] not in get_args(Kind):
            raise ValueError(facts["kind"])
        shape = tuple(map(int, facts["shape"]))
        mean, std = (tuple(map(float, facts.get(name, ()))) for name in ("mean", "std"))
        images = facts["kind"] == "images"
        if images and not (len(shape) == 3 and len(mean) == len(std) == shape[0]):  # (C, H, W)
            raise ValueError(f"mean {mean} and std {std} of {shape}")
        return cls(kind=facts["kind"], shape=shape, mean=mean, std=std)

    def to_plain(self) -> dict[str, Any]:
        """Return it as YAML and JSON have it."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items() if x != ()}

    def normalize(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn stored uint8 samples (B, ...) into inputs: images (B, C, H, W) into the `dtype`, tokens into int64."""
        return normalize(stored, self.mean, self.std, dtype) if self.kind == "images" else stored.long()


def normalize(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype, levels: int = 255
) -> Tensor:
    """Normalise stored images (B, C, H, W) uint8 to floats of mean 0 and deviation 1; `levels` is the value of white.

    Equal to torchvision's ToTensor and Normalize, bit for bit. Computes in float64 if that is the `dtype`, otherwise in
    float32.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    means, stds = (_per_channel(tuple(values), images.device, exact) for values in (mean, std))
    return images.to(exact).div_(levels).sub_(means).div_(stds).to(dtype)


@functools.cache
def _per_channel(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values as (C, 1, 1); cached, because a copy to a GPU waits for all work queued there."""
    with torch.inference_mode(False):  # the first call may be in evaluation, a later one in training
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
