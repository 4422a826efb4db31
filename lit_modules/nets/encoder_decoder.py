"""An encoder-decoder (Vaswani et al. 2017), a language model of prompts and responses."""

from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.cross import CrossAttention
from lit_modules.nets.base import check_sizes
from lit_modules.nets.block_options import BlockOptions, takes_block_options
from lit_modules.nets.blocks import block_arguments, make_block, make_norm
from lit_modules.nets.encoded_prompts import EncoderDecoderNet
from lit_modules.nets.gpt import STD, TokenEmbedding
from lit_modules.nets.transformer import Block

RESPONSE = 4  # U+0004, before a response in `Chat` without a tokenizer
# What a pre-norm block with a second attention has not, or both halves would number alike.
LEFT_OUT = ("mlp_ratio", "norm_place", "layer_scale", "attention_dropout", "router_noise")


class EncoderDecoder(EncoderDecoderNet):
    """Tokens (B, T) to logits (B, T, V): an encoder reads a row's prompt, a decoder with `CrossAttention` the rest.

    Both have pre-norm blocks, and share the tokens' embedding. Initial weights are normal with deviation 0.02.

    Args:
        vocab_size: V, number of tokens.
        block_size: tokens of a row at most.
        num_layers: blocks of the encoder and of the decoder, at least 1.
        num_heads: attention heads of a block, a divisor of `embed_dim`.
        embed_dim: D, width of tokens.
        dropout: probability of a zero in embeddings and residual branches; keyed.
        bias: whether projections and norms have a bias; the head has none.
        tie_weights: whether the head's weight is the tokens' embedding.
        prompt_end: the token that ends a prompt; default: the mark before a response of `data.tokenizer bytes`.
        options: those of `BlockOptions`.

    Raises:
        BadInput: a value can't be used, or is for a decoder alone.
    """

    feature_layer = "aligned"
    pooled_layer = "head<"

    @takes_block_options(without=LEFT_OUT)
    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        num_layers: int = 2,
        num_heads: int = 4,
        embed_dim: int = 128,
        dropout: float = 0.0,
        bias: bool = True,
        tie_weights: bool = True,
        prompt_end: int = RESPONSE,
        **options: Any,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, block_size=block_size, num_layers=num_layers, embed_dim=embed_dim)
        if options.get("qk_norm") == "width":
            raise BadInput("qk_norm", "width", "true or false, of each head")
        self.vocab_size, self.block_size, self.prompt_end, self.start = vocab_size, block_size, prompt_end, prompt_end
        shared: dict[str, Any] = {"embed_dim": embed_dim, "num_heads": num_heads, "dropout": dropout, "bias": bias}
        reads, writes = (BlockOptions(**shared, causal=causal, **options) for causal in (False, True))
        if reads.mlp == "moe" and reads.balance:
            raise BadInput("balance", reads.balance, "0: neither half has its tokens where a row's labels are")
        places, numbers = block_size if reads.position == "learned" else 0, range(num_layers)
        size = vocab_size, block_size, places, embed_dim, dropout
        self.prompt_embedding, self.embedding = TokenEmbedding(*size), TokenEmbedding(*size, layer=1 + 2 * num_layers)
        self.prompt_embedding.tokens = self.embedding.tokens
        self.encoder = nn.ModuleList(make_block(reads, number) for number in numbers)
        self.memory_norm = make_norm(reads)
        self.blocks = nn.ModuleList(_ReadingBlock(writes, number, num_layers) for number in numbers)
        self.norm = make_norm(writes)
        self.aligned = nn.Identity()  # what the head reads, where the row's tokens are
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tie_weights:
            self.head.weight = self.embedding.tokens.weight

    def encode(self, prompts: Tensor, present: Tensor) -> list[Any]:
        x = self.prompt_embedding(prompts)
        for block in self.encoder:
            x = block(x, mask=present)
        x = self.memory_norm(x)
        return [block.cross.remember(x, present) for block in self._blocks]

    def begin(self, memory: list[Any], capacity: int) -> list[Any]:
        return [block.attention.new_cache(capacity) for block in self._blocks]

    def decode(self, tokens: Tensor, memory: list[Any], past: list[Any] | None = None) -> tuple[Tensor, Any]:
        x = self.embedding(tokens, past[0].length if past else 0)
        for block, kept, cache in zip(self._blocks, memory, past or [None] * len(memory), strict=True):
            x = block(x, cache, memory=kept)
        return self.norm(x), past

    def end(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.aligned(x))
        return logits

    @property
    def _blocks(self) -> list[Any]:
        return list(self.blocks)


class _ReadingBlock(Block):
    """A pre-norm block with cross-attention to a memory between its mixer and its MLP."""

    def __init__(self, options: BlockOptions, number: int, encoder_layers: int) -> None:
        layer = 2 * (1 + encoder_layers) + 3 * number  # dropout layers come after those of the encoder
        super().__init__(**(block_arguments(options, number) | {"layer": layer}))
        o = options
        self.cross_norm = make_norm(o)
        self.cross = CrossAttention(
            o.embed_dim, o.num_heads, bias=o.bias, backend=o.backend, num_kv_heads=o.num_kv_heads,
            qk_norm=o.qk_norm is True, head_dim=o.head_dim, softcap=o.softcap, scale=o.scale,
        )  # fmt: skip
        self.cross_dropout = Dropout(o.dropout, layer + 2)

    def forward(self, x: Tensor, cache: Any = None, mask: Tensor | None = None, memory: Any = None) -> Tensor:
        x = x + self.dropout1(self._mix(self.norm1(x), cache, mask))
        x = x + self.cross_dropout(self.cross(self.cross_norm(x), memory))
        changed: Tensor = self.dropout2(self.mlp(self.norm2(x)))
        return x + changed
