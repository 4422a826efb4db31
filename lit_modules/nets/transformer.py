"""The transformer block of GPT and ViT."""

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from apprentice.keyed import Dropout
from lit_modules.nets.attention import Cache, SelfAttention
from lit_modules.nets.base import Net, check_sizes


class Block(nn.Module):
    """Pre-norm block: attention and then an MLP with GELU, each added to its input (GPT-2, Radford et al. 2019).

    Args:
        attention: of tokens of width D.
        mlp_ratio: the MLP's hidden width divided by D, at least 1.
        dropout: probability of a zero in the residual branches; keyed.
        bias: whether the MLP and norms have a bias.
        layer: number of the first of its two dropout layers in the net.
        norm_eps: epsilon of the norms.
    """

    def __init__(
        self,
        attention: SelfAttention,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        bias: bool = True,
        layer: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_sizes(mlp_ratio=mlp_ratio)
        embed_dim, hidden = attention.embed_dim, mlp_ratio * attention.embed_dim
        self.norm1 = nn.LayerNorm(embed_dim, norm_eps, bias=bias)
        self.attention = attention
        self.dropout1 = Dropout(dropout, layer)
        self.norm2 = nn.LayerNorm(embed_dim, norm_eps, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, hidden, bias), nn.GELU(), nn.Linear(hidden, embed_dim, bias))
        self.dropout2 = Dropout(dropout, layer + 1)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which follow any cached ones; a mask is that of `SelfAttention`."""
        x = x + self.dropout1(self.attention(self.norm1(x), cache, mask))
        change: Tensor = self.dropout2(self.mlp(self.norm2(x)))
        return x + change


class Transformer(Net):
    """A net with `Block`s as its `blocks`."""

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """How ranks share the blocks, by the paths of layers: each computes some heads and some of the MLPs' units."""
        mlps: dict[str, ParallelStyle] = {
            "blocks.*.mlp.0": ColwiseParallel(),
            "blocks.*.mlp.2": RowwiseParallel(),
        }
        mixers = [(name, block.attention) for name, block in self.named_modules() if isinstance(block, Block)]
        return {
            f"{name}.attention.{layer}": style
            for name, mixer in mixers
            for layer, style in getattr(mixer, "parallel_layers", dict)().items()
        } | mlps
