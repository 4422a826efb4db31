"""Attention maps of a net's blocks, for pictures."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import evaluating
from lit_modules.nets.layers import run
from lit_modules.nets.transformer import Block


def attention_maps(net: nn.Module, inputs: Tensor, starts: Tensor | None = None) -> dict[str, Tensor]:
    """Return the attention weights (B, H, T, T) of a net's blocks, by the paths of their mixers, in the blocks' order.

    Row i of a map has what token i takes of each token. Of `ViT`'s tokens the first `token_grid.before` are class and
    distillation tokens, then come patches row by row. The net runs once, in eval mode and without gradients. What
    mixers with a state give, such as `DeltaAttention`, need not sum to 1.

    Args:
        net: `GPT`, `ViT`, or a net with `Block`s in it.
        inputs: (B, T) tokens or (B, C, H, W) images, as the net takes them.
        starts: (B, T) int64, where the texts of a row begin, as `GPT.forward` takes it.

    Raises:
        BadInput: no block has a mixer with weights.
    """
    mixers = {f"{path}.attention": block.attention for path, block in net.named_modules() if isinstance(block, Block)}
    mixers = {path: mixer for path, mixer in mixers.items() if hasattr(mixer, "weights")}
    if not mixers:
        raise BadInput("net", type(net).__name__, "GPT, ViT, or a net of their blocks, with attention that has weights")
    maps: dict[str, Tensor] = {}

    def keep(path: str, mixer: Any, args: tuple[Any, ...], beside: dict[str, Any]) -> None:
        maps[path] = mixer.weights(*args, **beside)

    handles = [mixer.register_forward_pre_hook(partial(keep, path), with_kwargs=True) for path, mixer in mixers.items()]
    try:
        with evaluating(net):
            run(net, inputs, (), () if starts is None else (starts,))
    finally:
        for handle in handles:
            handle.remove()
    return maps
