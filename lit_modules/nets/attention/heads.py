"""Numbers of heads, and the part of them that a rank computes."""

from torch import Tensor, nn

from apprentice.errors import BadInput


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> None:
    """Raise BadInput unless these heads can be made: K divides H, and H the width, unless the heads' is given."""
    if num_heads < 1 or (head_dim is None and embed_dim % num_heads):
        raise BadInput("num_heads", num_heads, f"a divisor of embed_dim, {embed_dim}")
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        raise BadInput("num_kv_heads", num_kv_heads, f"a divisor of num_heads, {num_heads}")
    if head_dim is not None and head_dim < 1:
        raise BadInput("head_dim", head_dim, "at least 1")


def check_widths(**widths: int) -> None:
    """Raise BadInput for the first that is below 1."""
    for name, width in widths.items():
        if width < 1:
            raise BadInput(name, width, "at least 1")


def of_rank(mask: Tensor, heads: int, layer: nn.Module) -> Tensor:
    """Return a mask's part for the heads of a rank, if ranks share the layer that makes its queries."""
    if mask.dim() == 2 or mask.shape[1] in {1, heads}:
        return mask
    rank: int = getattr(layer, "part", 0)
    return mask[:, rank * heads : (rank + 1) * heads]
