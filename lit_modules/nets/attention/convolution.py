"""The short causal convolution before linear attention, without which recall tasks stay at chance (H3, Mamba)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput


class ShortConvolution(nn.Module):
    """SiLU of a causal depthwise convolution: each channel mixes a token with the `width` - 1 before it in its text.

    As Conv1d(channels, channels, width, groups=channels, bias=False) padded on the left, whose weight without its
    middle dimension is this one's.

    Args:
        channels: C.
        width: W, tokens that a token sees, itself included; at least 1.
    """

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        if width < 1:
            raise BadInput("conv", width, "a width of at least 1, or 0 for no convolution")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))  # the last tap is the token itself
        nn.init.uniform_(self.weight, -1 / math.sqrt(width), 1 / math.sqrt(width))  # as Conv1d

    def forward(self, x: Tensor, before: Tensor | None = None, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (B, T, C) of tokens (B, T, C), and what to pass as `before` with the tokens after these.

        Args:
            x: tokens, T at least 1.
            before: (B, W - 1, C), the tokens before them; zeros if None.
            starts: (B, T) int64, the place in x of the first token of each one's text, below 0 for one in `before`.
        """
        length, places = x.shape[1], torch.arange(x.shape[1], device=x.device)
        if before is None:
            before = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        x = torch.cat([before, x], 1)
        total: Tensor | None = None
        for back in range(self.width):
            tap = self.width - 1 - back
            product = x[:, tap : tap + length] * self.weight[:, tap]
            if starts is not None and back:
                product = product * (places - back >= starts)[..., None]
            total = product if total is None else total + product
        assert total is not None
        return F.silu(total), x[:, length:]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"
