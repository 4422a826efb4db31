"""GPT-2 (Radford et al. 2019), a language model of any tokens."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention import Backend, Cache, SelfAttention, mask_texts
from lit_modules.nets.base import check_sizes
from lit_modules.nets.generation import Decoder, Sampling, generate, row_keys
from lit_modules.nets.transformer import Block, Transformer

STD = 0.02  # of GPT-2's initial weights


class GPT(Transformer):
    """Tokens (B, T) to logits (B, T, V) of each next token; pre-norm blocks, learned positions.

    Initial weights as in GPT-2: normal with deviation 0.02, divided by √(2 · num_layers) in residual projections.

    Args:
        vocab_size: V, number of tokens.
        block_size: the longest text, in tokens.
        num_layers: blocks, at least 1.
        num_heads: attention heads of a block, a divisor of `embed_dim`.
        embed_dim: D, width of tokens.
        dropout: probability of a zero in embeddings and residual branches; keyed.
        bias: whether projections and norms have a bias; the head has none.
        tie_weights: whether the head's weight is the tokens' embedding. A pipeline needs False.
        attention_dropout: probability of a zero attention weight; the kernel draws it, so it is not keyed.
        backend: the attention kernel, see `SelfAttention`.
    """

    feature_layer = "norm"
    pooled_layer = "head<"

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        num_layers: int = 4,
        num_heads: int = 4,
        embed_dim: int = 128,
        dropout: float = 0.0,
        bias: bool = True,
        tie_weights: bool = True,
        attention_dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, block_size=block_size, num_layers=num_layers, embed_dim=embed_dim)
        if not 0 <= attention_dropout < 1:
            raise BadInput("attention_dropout", attention_dropout, "at least 0, less than 1")
        self.block_size, self.tie_weights = block_size, tie_weights
        self.embedding = _Embedding(vocab_size, block_size, embed_dim, dropout)
        attention = partial(SelfAttention, embed_dim, num_heads, True, attention_dropout, bias, backend)
        self.blocks = nn.ModuleList(
            Block(attention(), dropout=dropout, bias=bias, layer=1 + 2 * number) for number in range(num_layers)
        )
        self.stages = tuple(f"blocks.{number}" for number in range(num_layers))
        self.norm = nn.LayerNorm(embed_dim, bias=bias)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * num_layers))
        if tie_weights:
            self.head.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of tokens (B, T) of any integer type; BadInput if T is more than the block size.

        Of rows with several texts, `starts` (B, T) has the place of each token's first one: it is at position 0, and
        texts don't attend to one another.
        """
        x, mask = self.embedding(tokens, starts=starts), None if starts is None else mask_texts(starts)  # (B, T, D)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask=mask)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        """Embedding, each block, norm and head; BadInput if embedding and head, the ends, share a weight."""
        if self.tie_weights:
            raise BadInput("tie_weights", True, "False in a pipeline: tie_weights=False gives the last stage its own")
        return [self.embedding, *self.blocks, self.norm, self.head]

    def generate(
        self,
        tokens: Tensor,
        length: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        cached: bool = True,
    ) -> Tensor:
        """Continue prompts, at most up to the block size.

        Draws depend on seed, row and position alone, so other rows change a row by rounding only.

        Args:
            tokens: (B, t) int64, the prompts, 1 to `block_size` tokens.
            length: new tokens at most; default: up to the block size.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw from this many of the likeliest tokens; default: from all.
            seed: of the draws.
            cached: cache keys and values instead of computing all tokens again for each new one.

        Returns:
            (B, t + new) int64, prompts included.

        Raises:
            BadInput: a prompt is empty or longer than the block, or an option's value can't be used.
        """
        if length is not None and length < 0:
            raise BadInput("length", length, "0 or more tokens")
        sampling, (rows, start) = Sampling(temperature, top_k), tokens.shape
        room = self.block_size - start
        if not start or room < 0:
            raise BadInput("tokens", tuple(tokens.shape), f"prompts of 1 to {self.block_size} tokens")
        keys = row_keys(torch.arange(rows, device=tokens.device), seed)
        count, lengths = room if length is None else min(room, length), tokens.new_full((rows,), start)
        written = generate(self, tokens, lengths, count, keys, sampling, cached=cached).tokens
        return torch.cat([tokens, written], 1)

    def decoder(self, capacity: int, padding: Tensor | None) -> Decoder:
        """Return what `generate` of `lit_modules.nets.generation` asks for the next logits."""
        return partial(self._last, caches=[Cache(capacity, padding) for _ in self.blocks])

    def _last(self, tokens: Tensor, caches: Sequence[Cache]) -> Tensor:
        """Compute logits (B, V) after the last of tokens (B, T), which follow any cached ones."""
        start, padding = caches[0].length, caches[0].padding
        x = self.embedding(tokens, start, padding)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits


class _Embedding(nn.Module):
    def __init__(self, vocab_size: int, block_size: int, embed_dim: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(block_size, embed_dim)
        self.noise = Dropout(dropout, 0)

    def forward(
        self, tokens: Tensor, start: int = 0, padding: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """(B, T) -> (B, T, D), the first token at `start`, less a text's `padding` (B,), or `starts` (B, T)."""
        end, block_size = start + tokens.shape[1], self.positions.num_embeddings
        if end > block_size and padding is None:
            raise BadInput("tokens", tuple(tokens.shape), f"texts of at most {block_size}, the block size")
        places = torch.arange(start, end, device=tokens.device)
        if padding is not None:
            places = (places - padding[:, None]).clamp(0, block_size - 1)
        if starts is not None:
            places = places - starts
        embedded: Tensor = self.noise(self.tokens(tokens.long()) + self.positions(places))
        return embedded
