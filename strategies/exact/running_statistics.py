"""Merges what shards make of BatchNorm's running statistics."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """Running statistics of normalisation layers in training: each shard starts from the same, results are merged."""

    def __init__(self, *modules: nn.Module) -> None:
        layers = [m for module in modules for m in module.modules() if isinstance(m, _NormBase) and m.training]
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._start = [buffer.clone() for buffer in self._buffers]
        mine = set(self._buffers)
        self._others = {
            name: (buffer, buffer._version)
            for module in modules
            for name, buffer in module.named_buffers()
            if not buffer.is_inference() and buffer not in mine
        }
        self.size = sum(buffer.numel() for buffer in self._buffers)

    def take(self) -> list[Tensor]:
        """The statistics after a shard, float64 and flat; the buffers get their first values back.

        ValueError if another buffer has changed, which can't be merged.
        """
        if changed := [name for name, (buffer, version) in self._others.items() if buffer._version != version]:
            raise ValueError(f"expected training steps that change no buffer but BatchNorm's; {changed[0]} has changed")
        found = [buffer.to(torch.float64, copy=True).flatten() for buffer in self._buffers]
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.data.copy_(start)  # `data`: autograd has saved the buffer and refuses changes that it sees
        return found

    def put(self, merged: Tensor) -> None:
        """Set the buffers to merged values, (size,) float64."""
        pieces = merged.split([buffer.numel() for buffer in self._buffers])
        for buffer, values in zip(self._buffers, pieces, strict=True):
            buffer.copy_((values if buffer.is_floating_point() else values.round()).view_as(buffer))
