"""Ranges of tensors over the global batch, from which scales and zero points follow.

torchao's observers see only one rank's rows, and observe in evaluation too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import replicas
from lit_modules.nets.layers import drop_stand_ins


class Range(nn.Module):
    """A moving average of the global batch's minimum and maximum, observed in training only.

    An observer for torchao's FakeQuantize. Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference", section 3.1.

    Its arguments are those of torchao's observers. `qscheme` is `per_tensor_affine`, or `per_channel_symmetric` for a
    weight, which is equal on all ranks; `averaging_constant` is the weight of a new batch: 1 keeps the last range only.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        dtype: torch.dtype,
        qscheme: torch.qscheme,
        quant_min: int,
        quant_max: int,
        ch_axis: int = 0,
        averaging_constant: float = 0.01,
        eps: float = 2**-12,
        is_dynamic: bool = False,
        **_options: Any,
    ) -> None:
        super().__init__()
        self.dtype, self.qscheme, self.quant_min, self.quant_max = dtype, qscheme, quant_min, quant_max
        self.ch_axis, self.averaging_constant, self.eps, self.is_dynamic = ch_axis, averaging_constant, eps, is_dynamic
        self.per_channel = qscheme == torch.per_channel_symmetric
        for name, value in (("low", torch.inf), ("high", -torch.inf)):
            self.register_buffer(name, torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        """Observe x: activations (b, ...), where b may be 0, or a weight (channels, ...)."""
        if self.training:
            if self.per_channel:
                rows = x.detach().transpose(0, self.ch_axis).flatten(1).to(self.low.dtype)
                low, high = rows.amin(1), rows.amax(1)
            else:
                low, high = self._ends(x)
            first = not self.low.isfinite().all()
            for average, value in ((self.low, low), (self.high, high)):
                average.resize_(value.shape).copy_(value if first else average.lerp(value, self.averaging_constant))
        return x

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Range":
        def apply(x: Tensor) -> Tensor:  # in 16 bits a moving average of 0.01 would not move
            y = fn(x)
            return y if y.element_size() >= 4 else x.to(y.device)

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]  # torch's has no hints
        return self

    def forget(self) -> None:
        """Reset to nothing observed."""
        self.low.fill_(torch.inf)
        self.high.fill_(-torch.inf)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ends = self.low.new_full((2,), -torch.inf)
        if (rows := drop_stand_ins(x.detach())).numel():
            low, high = torch.aminmax(rows)
            ends = torch.stack([-low, high]).to(self.low.dtype)
        ends = replicas.all_gather(ends).amax(0)  # over the ranks
        return -ends[:1], ends[1:]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in ("low", "high"):
            if f"{prefix}{name}" in state_dict:
                getattr(self, name).resize_(state_dict[f"{prefix}{name}"].shape)  # one for each channel, once observed
        super()._load_from_state_dict(state_dict, prefix, *args)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale in float32 and zero point, (1,) or (channels,); 1 and 0 before anything is observed."""
        if not self.low.isfinite().all():
            return torch.ones_like(self.low).float(), torch.zeros_like(self.low, dtype=torch.int64)
        low, high = self.low.clamp(max=0), self.high.clamp(min=0)
        if self.per_channel:
            scale = torch.maximum(-low, high) / ((self.quant_max - self.quant_min) / 2)
            return scale.clamp(min=self.eps).float(), torch.zeros_like(scale, dtype=torch.int64)
        scale = ((high - low) / (self.quant_max - self.quant_min)).clamp(min=self.eps)
        zero = (self.quant_min - (low / scale).round()).clamp(self.quant_min, self.quant_max)
        return scale.float(), zero.long()
