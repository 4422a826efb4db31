"""Tokens of an image's patches as maps: a net says by `token_grid` where its tokens stand in the image."""

from typing import Any, NamedTuple

from torch import Tensor, nn


class TokenGrid(NamedTuple):
    """The places of tokens (B, before + rows * columns, D): patches row by row, after `before` others.

    The others are class, distillation and register tokens. A layer may give the patches alone. With `channels_last`
    outputs of four dimensions are (B, H, W, C), of any H and W, as those of Swin.
    """

    rows: int
    columns: int
    before: int = 0
    channels_last: bool = False

    def __str__(self) -> str:
        others = f" and {self.before} before them" if self.before else ""
        return f"{self.rows} x {self.columns} patches{others}"


def token_grid(net: nn.Module) -> TokenGrid | None:
    """Return a net's `token_grid`; None if it has no tokens of patches, or does not say where they stand."""
    grid: Any = getattr(net, "token_grid", None)
    return None if grid is None else TokenGrid(*grid)


def as_maps(x: Tensor, grid: TokenGrid | None) -> Tensor:
    """Return a layer's output as maps (B, C, H, W), without the tokens before the patches; others stay as they are."""
    if grid is None:
        return x
    if x.dim() == 4 and grid.channels_last:
        return x.permute(0, 3, 1, 2)
    patches = grid.rows * grid.columns
    if x.dim() != 3 or x.shape[1] not in (patches, patches + grid.before):
        return x
    maps: Tensor = x[:, x.shape[1] - patches :].mT.unflatten(2, (grid.rows, grid.columns))
    return maps
