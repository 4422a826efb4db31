"""The transformer block of GPT and ViT."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.rms_norm import check_eps
from lit_modules.nets.base import Net, check_sizes
from lit_modules.nets.mlps import GeluMLP

NormPlace = Literal["pre", "post", "sandwich", "after"]


class LayerScale(nn.Module):
    """x ⊙ gamma, one factor a channel of tokens (..., D), which starts at a small value (CaiT, arXiv:2103.17239)."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """A mixer of tokens and then an MLP, each added to its input; by default GPT-2's (Radford et al. 2019).

    Norms stand before each of the two (`pre`: x + f(norm(x))), after the sum (`post`: norm(x + f(x)), Vaswani et al.
    2017), before and after each (`sandwich`: x + norm(f(norm(x))), Gemma 2), or after each (`after`: x + norm(f(x)),
    OLMo 2).

    Args:
        attention: the mixer, of tokens of width D: `SelfAttention` or another `TokenMixer`.
        mlp_ratio: the default MLP's hidden width divided by D, at least 1.
        dropout: probability of a zero in the residual branches; keyed.
        bias: whether the default MLP and norms have a bias.
        layer: number of the first of its two dropout layers in the net.
        norm_eps: epsilon of the default norms.
        mlp: in place of the default, an MLP with GELU.
        make_norm: makes each norm, in place of the default, a layer norm.
        norm_place: pre, post, sandwich or after.
        layer_scale: first value of a `LayerScale` of what is added in each of the two; None for none.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        bias: bool = True,
        layer: int = 0,
        norm_eps: float = 1e-5,
        mlp: nn.Module | None = None,
        make_norm: Callable[[], nn.Module] | None = None,
        norm_place: NormPlace = "pre",
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        check_sizes(mlp_ratio=mlp_ratio)
        if norm_place not in get_args(NormPlace):
            raise BadInput("norm_place", norm_place, "pre, post, sandwich or after")
        if layer_scale is not None and not 0 < layer_scale < math.inf:
            raise BadInput("layer_scale", layer_scale, "a number above 0, or null")
        check_eps(norm_eps=norm_eps)
        width: Any = getattr(attention, "embed_dim", None)  # of the defaults, if they are needed
        make_norm = make_norm or (lambda: nn.LayerNorm(width, norm_eps, bias=bias))
        self.norm_place = norm_place
        self.norm1 = make_norm()
        self.attention = attention
        self.dropout1 = Dropout(dropout, layer)
        self.norm2 = make_norm()
        self.mlp = GeluMLP(width, mlp_ratio * width, bias) if mlp is None else mlp
        self.dropout2 = Dropout(dropout, layer + 1)
        after = [make_norm() if norm_place == "sandwich" else None for _ in range(2)]
        self.norm1_after, self.norm2_after = after
        scales = [None if layer_scale is None else LayerScale(width, layer_scale) for _ in range(2)]
        self.layer_scale1, self.layer_scale2 = scales

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which follow any cached ones; a mask is that of the mixer."""
        is_normed = self.norm_place in {"pre", "sandwich"}
        mixed = self._mix(self.norm1(x) if is_normed else x, cache, mask)
        x = self._add(x, mixed, self.norm1, self.norm1_after, self.layer_scale1, self.dropout1)
        change = self.mlp(self.norm2(x) if is_normed else x)
        return self._add(x, change, self.norm2, self.norm2_after, self.layer_scale2, self.dropout2)

    def _add(
        self, x: Tensor, change: Tensor, norm: nn.Module, after: nn.Module | None, scale: nn.Module | None,
        dropout: nn.Module,
    ) -> Tensor:  # fmt: skip
        """Add what a part gives to its input, with the norms that stand behind it."""
        after = norm if self.norm_place == "after" else after
        change = change if after is None else after(change)
        x = x + dropout(change if scale is None else scale(change))
        return norm(x) if self.norm_place == "post" else x

    def _mix(self, x: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        """Call the mixer, a simple one of which takes neither cache nor mask."""
        beside = {name: value for name, value in (("cache", cache), ("mask", mask)) if value is not None}
        mixed: Tensor = self.attention(x, **beside)
        return mixed

    def parallel_layers(self) -> dict[str, ParallelStyle]:
        """How ranks share the block, by the paths of layers: each computes some heads and some of the MLP's units."""
        parts = {"attention": self.attention, "mlp": self.mlp}
        plans: dict[str, Any] = {name: getattr(part, "parallel_layers", dict)() for name, part in parts.items()}
        return {f"{name}.{path}": style for name, plan in plans.items() for path, style in plan.items()}


class Transformer(Net):
    """A net with `Block`s as its `blocks`."""

    blocks: nn.ModuleList

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """How ranks share the blocks, by the paths of layers."""
        plans = [block.parallel_layers() for block in cast("Iterable[Block]", self.blocks)]
        return {f"blocks.{number}.{path}": style for number, plan in enumerate(plans) for path, style in plan.items()}

    def check_pipeline(self) -> None:
        """Raise BadInput if experts' loads are to be balanced, by a loss of routers in all stages of a pipeline."""
        balances = [getattr(block.mlp, "balance", 0.0) for block in self.blocks]
        if any(balances):
            raise BadInput("balance", balances[0], "0 in a pipeline, whose last stage does not see the routers")
