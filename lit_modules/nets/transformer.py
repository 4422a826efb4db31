"""The transformer block of GPT and ViT."""

from torch import Tensor, nn

from apprentice.keyed import Dropout
from lit_modules.nets.attention import Backend, Cache, SelfAttention


class Block(nn.Module):
    """Pre-norm block: attention and then an MLP with GELU, each added to its input (GPT-2, Radford et al. 2019).

    Args:
        embed_dim: D, width of tokens.
        num_heads: attention heads, a divisor of `embed_dim`.
        mlp_ratio: the MLP's hidden width divided by D.
        causal: whether a token attends only to itself and earlier tokens.
        dropout: probability of a zero in the residual branches; keyed.
        bias: whether projections and norms have a bias.
        backend: the attention kernel, see `SelfAttention`.
        attention_dropout: probability of a zero attention weight; the kernel draws it, so it is not keyed.
        layer: number of its first dropout layer; it has two.
        norm_eps: epsilon of the norms.

    Raises:
        ValueError: `mlp_ratio` is below 1, or `SelfAttention` refuses a value.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: int = 4,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        backend: Backend = "auto",
        attention_dropout: float = 0.0,
        layer: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if mlp_ratio < 1:
            raise ValueError(f"mlp_ratio {mlp_ratio}: expected at least 1")
        hidden = mlp_ratio * embed_dim
        self.norm1 = nn.LayerNorm(embed_dim, norm_eps, bias=bias)
        self.attention = SelfAttention(embed_dim, num_heads, causal, attention_dropout, bias, backend)
        self.dropout1 = Dropout(dropout, layer)
        self.norm2 = nn.LayerNorm(embed_dim, norm_eps, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, hidden, bias), nn.GELU(), nn.Linear(hidden, embed_dim, bias))
        self.dropout2 = Dropout(dropout, layer + 1)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T, D) of tokens (B, T, D), which follow any cached ones."""
        x = x + self.dropout1(self.attention(self.norm1(x), cache))
        return x + self.dropout2(self.mlp(self.norm2(x)))
