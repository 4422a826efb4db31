"""GPT-2 (Radford et al. 2019) and its descendants, language models of any tokens."""

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.base import check_sizes, check_tokens
from lit_modules.nets.block_options import BlockOptions, takes_block_options
from lit_modules.nets.blocks import make_block, make_last_norm
from lit_modules.nets.families import FAMILIES, family_of, fit_family
from lit_modules.nets.family_weights import from_family, to_family
from lit_modules.nets.generation import CachedDecoder, Sampling, generate, row_keys
from lit_modules.nets.mixers import CachedMixer, MeasuredMixer, check_mixer
from lit_modules.nets.mlps import MixtureOfExperts
from lit_modules.nets.transformer import Transformer
from lit_modules.nets.transformers_models import import_transformers

STD = 0.02  # of GPT-2's initial weights


class GPT(Transformer):
    """Tokens (B, T) to logits (B, T, V) of each next token; as it comes, pre-norm blocks with learned positions.

    Initial weights as in GPT-2: normal with deviation 0.02, divided by √(2 · num_layers) in residual projections.

    Args:
        vocab_size: V, number of tokens.
        block_size: the longest text, in tokens; of a net whose mixers have a state, without learned positions or
            softmax attention, of those that it is trained on: others may be longer.
        num_layers: blocks, at least 1.
        num_heads: attention heads of a block, a divisor of `embed_dim`.
        embed_dim: D, width of tokens.
        dropout: probability of a zero in embeddings and residual branches; keyed.
        bias: whether projections and norms have a bias; the head has none.
        tie_weights: whether the head's weight is the tokens' embedding. A pipeline needs False.
        final_softcap: c of logits c · tanh(logit / c) (Gemma 2: 30); null for none.
        scale_embedding: multiply tokens' embeddings by √D (Gemma).
        options: those of `BlockOptions`.
    """

    feature_layer = "norm"
    pooled_layer = "head<"

    @takes_block_options(without=["mlp_ratio"])
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
        final_softcap: float | None = None,
        scale_embedding: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, block_size=block_size, num_layers=num_layers, embed_dim=embed_dim)
        if final_softcap is not None and not final_softcap > 0:
            raise BadInput("final_softcap", final_softcap, "above 0, or null")
        parts = BlockOptions(
            embed_dim=embed_dim, num_heads=num_heads, causal=True, dropout=dropout, bias=bias, **options
        )
        if parts.softmax_layers and max(parts.softmax_layers) >= num_layers:
            raise BadInput("softmax_layers", parts.softmax_layers, f"blocks from 0 to {num_layers - 1}")
        self.block_size, self.tie_weights = block_size, tie_weights
        places = block_size if parts.position == "learned" else 0
        factor = math.sqrt(embed_dim) if scale_embedding else 1.0
        self.embedding = TokenEmbedding(vocab_size, block_size, places, embed_dim, dropout, factor)
        self.blocks = nn.ModuleList(make_block(parts, number) for number in range(num_layers))
        self.stages = tuple(f"blocks.{number}" for number in range(num_layers))
        is_endless = not places and all(getattr(mixer, "has_state", False) for mixer in self._mixers)
        self.longest_text = self.embedding.longest_text = None if is_endless else block_size
        self.norm = make_last_norm(parts)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.cap = None if final_softcap is None else SoftCap(final_softcap)
        self._draw_weights(num_layers)
        for number, mixer in enumerate(self._mixers):
            if callable(parts.mixer) and not parts.has_softmax(number):
                check_mixer(mixer, embed_dim)
        if tie_weights:
            self.head.weight = self.embedding.tokens.weight

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each option that has one."""
        parameters = inspect.signature(cls).parameters.values()
        return {x.name: x.default for x in parameters if x.default is not inspect.Parameter.empty}

    @classmethod
    def from_hf(cls, model: Any, **options: Any) -> "GPT":
        """Return a GPT with a transformers model's settings and weights, of one of `families.FAMILIES`.

        Args:
            model: a causal language model, whose type it keeps, or the name or folder of one, read in float32.
            options: that change none of its weights, such as `backend`, or a smaller `block_size` of rotary positions.

        Raises:
            Missing: transformers is not installed.
            BadInput: a model of another family, or one that computes what GPT does not.
        """
        if isinstance(model, str | Path):
            with import_transformers(str(model), "a causal language model") as transformers:
                kind = transformers.AutoModelForCausalLM
                model = kind.from_pretrained(str(model), dtype=torch.float32, trust_remote_code=False)
        family = family_of(model.config)
        net = cls(**{**family.read(model.config), **options}).to(next(model.parameters()).dtype)
        net.load_state_dict(from_family(net, model, family.names))
        return net.train(model.training)

    def as_transformers(self) -> Any:
        """Return a model of transformers with the same weights and logits, in eval mode.

        Raises:
            Missing: transformers is not installed.
            BadInput: no family of transformers has the net's options.
        """
        with import_transformers(type(self).__name__, "a model of transformers") as transformers:
            name, config = fit_family(self.init_args, self.defaults(), transformers)
            dtype = self.embedding.tokens.weight.dtype
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        to_family(self, model, FAMILIES[name].names)
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the folder of a model of transformers, which `from_hf` and transformers read; see `as_transformers`."""
        self.as_transformers().save_pretrained(folder)

    def _draw_weights(self, num_layers: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, MixtureOfExperts):
                nn.init.normal_(module.gate, std=STD)
                nn.init.normal_(module.up, std=STD)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight", "mlp.down.weight", "mlp.down")):
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * num_layers))

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of tokens (B, T), whole numbers; BadInput for others, or more than `longest_text`.

        Of rows with several texts, `starts` (B, T) has the place of each token's first one: it is at position 0, and
        texts don't attend to one another.
        """
        check_tokens(tokens, starts)
        x, mask = self.embedding(tokens, starts=starts), None if starts is None else mask_texts(starts)  # (B, T, D)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask=mask)
        return self._logits(x)

    def end(self, x: Tensor, first: int, counted: Tensor) -> Tensor:
        """Logits (n, V) of the tokens that count (b, T), of what the block of this number reads, x (b, T, D)."""
        for block in list(self.blocks)[first:]:
            x = block(x)
        return self._logits(x[counted])

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits if self.cap is None else self.cap(logits)

    def pipeline_stages(self) -> list[nn.Module]:
        """Embedding, each block, norm, head, cap of logits; BadInput if embedding and head, the ends, share one."""
        if self.tie_weights:
            raise BadInput("tie_weights", True, "False in a pipeline: tie_weights=False gives the last stage its own")
        self.check_pipeline()
        cap = [] if self.cap is None else [self.cap]
        return [self.embedding, *self.blocks, self.norm, self.head, *cap]

    def generate(
        self,
        tokens: Tensor,
        length: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        cached: bool = True,
    ) -> Tensor:
        """Continue prompts, at most up to the longest text.

        Draws depend on seed, row and position alone, so other rows change a row by rounding only.

        Args:
            tokens: (B, t) integers, the prompts, 1 to `longest_text` tokens.
            length: new tokens at most; default: up to the block size.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw from this many of the likeliest tokens; default: from all.
            seed: of the draws.
            cached: cache keys and values instead of computing all tokens again for each new one.

        Returns:
            (B, t + new) int64, prompts included.

        Raises:
            BadInput: a prompt is empty or too long, or an option's value can't be used.
        """
        if length is not None and length < 0:
            raise BadInput("length", length, "0 or more tokens")
        check_tokens(tokens)
        sampling, tokens, (rows, start) = Sampling(temperature, top_k), tokens.long(), tokens.shape
        longest = self.longest_text
        if not start or (longest is not None and start > longest):
            expected = "prompts of 1 token or more" if longest is None else f"prompts of 1 to {longest} tokens"
            raise BadInput("tokens", tuple(tokens.shape), expected)
        room = max(self.block_size - start, 0)
        if length is not None:
            room = length if longest is None else min(room, length)
        keys, lengths = row_keys(torch.arange(rows, device=tokens.device), seed), tokens.new_full((rows,), start)
        written = generate(self, tokens, lengths, room, keys, sampling, cached=cached).tokens
        return torch.cat([tokens, written], 1)

    def decoder(self, capacity: int, padding: Tensor | None) -> CachedDecoder | None:
        """Return what `generate` of `lit_modules.nets.generation` asks for the next logits.

        None if a mixer, one of your own, has no `new_cache`.
        """
        mixers = [mixer for mixer in self._mixers if isinstance(mixer, CachedMixer)]
        if len(mixers) < len(self._mixers):
            return None
        caches = [mixer.new_cache(capacity, padding) for mixer in mixers]
        return CachedDecoder(self._continue, self._logits, caches, padding)

    @property
    def _mixers(self) -> list[Any]:
        return [block.attention for block in self.blocks]

    def cache_bytes(self, tokens: int, element_size: int) -> int | None:
        """Return the bytes that all blocks keep of a text of so many tokens while it is continued; None if unknown."""
        mixers = [mixer for mixer in self._mixers if isinstance(mixer, MeasuredMixer)]
        if len(mixers) < len(self._mixers):
            return None
        return sum(mixer.cache_bytes(tokens, element_size) for mixer in mixers)

    def _continue(self, tokens: Tensor, start: int, padding: Tensor | None, caches: Sequence[Any]) -> Tensor:
        """Compute what the last norm reads, (B, T, D), of tokens (B, T) from `start` on, which follow cached ones."""
        x: Tensor = self.embedding(tokens, start, padding)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return x


class TokenEmbedding(nn.Module):
    """Tokens as vectors times a factor, with learned positions if there are places for them."""

    def __init__(
        self, vocab_size: int, block_size: int, places: int, embed_dim: int, dropout: float, factor: float = 1.0,
        layer: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.block_size, self.factor = block_size, factor
        self.longest_text: int | None = block_size
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(places, embed_dim) if places else None
        self.noise = Dropout(dropout, layer)

    def forward(
        self, tokens: Tensor, start: int = 0, padding: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """(B, T) -> (B, T, D), the first token at `start`, less a text's `padding` (B,), or `starts` (B, T)."""
        end = start + tokens.shape[1]
        if self.longest_text is not None and end > self.longest_text and padding is None:
            raise BadInput("tokens", tuple(tokens.shape), f"texts of at most {self.longest_text}, the block size")
        x: Tensor = self.tokens(tokens.long())
        if self.factor != 1:
            x = x * torch.tensor(self.factor, dtype=x.dtype)  # rounded to the type of the weights, as Gemma's
        if self.positions is not None:
            x = x + self.positions(self._places(start, end, tokens.device, padding, starts))
        embedded: Tensor = self.noise(x)
        return embedded

    def _places(
        self, start: int, end: int, device: torch.device, padding: Tensor | None, starts: Tensor | None
    ) -> Tensor:
        places = torch.arange(start, end, device=device)
        if padding is not None:
            places = (places - padding[:, None]).clamp(0, self.block_size - 1)
        return places if starts is None else places - starts


class SoftCap(nn.Module):
    """c · tanh(x / c), which no logit exceeds (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)

    def extra_repr(self) -> str:
        return f"{self.cap}"
