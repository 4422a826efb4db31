"""GPT-2 (Radford et al. 2019) and its descendants, language models of any tokens."""

import inspect
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.gguf import model_folder
from apprentice.keyed import Dropout
from lit_modules.nets.attention import Backend, FeatureMap, mask_texts
from lit_modules.nets.base import check_sizes
from lit_modules.nets.families import FAMILIES, family_of, fit_family, from_family, to_family
from lit_modules.nets.generation import Decoder, Sampling, generate, row_keys
from lit_modules.nets.hugging_face import import_transformers
from lit_modules.nets.mixers import Blocks, MixerName, Mixers, TokenPosition
from lit_modules.nets.mlps import MixtureOfExperts, TokenMLP
from lit_modules.nets.norms import TokenNorm
from lit_modules.nets.transformer import NormPlace, Transformer

STD = 0.02  # of GPT-2's initial weights


class GPT(Transformer):
    """Tokens (B, T) to logits (B, T, V) of each next token; as it comes, pre-norm blocks with learned positions.

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
        attention_dropout: probability of a zero attention weight; keyed, but for a kernel that is chosen by its name.
        backend: the attention kernel, see `SelfAttention`.
        mixer: what mixes tokens: softmax attention, latent (DeepSeek's, a compressed cache), differential, or linear,
            gated (GLA) or delta (Gated DeltaNet), whose state does not grow with the text, or windowed: softmax in a
            window (64) and linear beyond it (LoLCATs).
        softmax_every: beside such a mixer, every n-th block has softmax attention; null for none.
        softmax_layers: beside such a mixer, the blocks that have softmax attention; the first is 0.
        conv: width of the short convolution of linear, gated and delta, 0 for none; null: 4 of delta, 0 of the others.
        feature_map: elu, hedgehog or taylor; null: elu of linear, hedgehog of windowed.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`; 1 is multi-query; null for as many.
        head_dim: width of a head; null for `embed_dim` / `num_heads`.
        position: learned positions are added to tokens; rotary ones turn queries and keys; alibi lowers scores by
            distance; null for none.
        rope_base: of rotary positions' frequencies.
        rope_scaling: of rotary positions beyond the texts of pretraining, as transformers' `rope_parameters`.
        window: a token attends to itself and the `window` - 1 before it; null for all.
        full_every: with a window, every n-th block attends to all tokens; null for none (Gemma 2: 2).
        sinks: with a window, a text's first tokens to which all attend.
        qk_norm: whether queries and keys of each head are normed (Qwen3).
        softcap: c of scores c · tanh(score / c) (Gemma 2: 50); null for none.
        final_softcap: the same of logits (Gemma 2: 30).
        gate: whether heads' outputs are multiplied by sigmoids of the token.
        scale: of scores; null for 1 / √head_dim.
        norm: layer norm or rms.
        norm_place: pre, post (after each sum) or sandwich (before and after each part, Gemma 2).
        norm_eps: epsilon of the norms.
        unit_offset: RMS norms multiply by 1 + weight (Gemma).
        mlp: gelu, gelu_tanh (GPT-2's), swiglu (Llama), geglu (Gemma) or moe, a mixture of SwiGLU experts.
        hidden: width of the MLP, or of each expert; null: 4 D, if gated 8 D / 3.
        experts: of a mixture.
        top_k: experts that a token goes through.
        renormalise: whether the weights of a token's experts sum to 1 (Mixtral).
        router_noise: in training routers' inputs are multiplied by 1 ± this; keyed.
        balance: weight of the loss that balances experts' loads, over the global batch (Switch: 0.01).
        scale_embedding: multiply tokens' embeddings by √D (Gemma).
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
        mixer: MixerName = "softmax",
        softmax_every: int | None = None,
        softmax_layers: list[int] | None = None,
        conv: int | None = None,
        feature_map: FeatureMap | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: TokenPosition | None = "learned",
        rope_base: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        window: int | None = None,
        full_every: int | None = None,
        sinks: int = 0,
        qk_norm: bool = False,
        softcap: float | None = None,
        final_softcap: float | None = None,
        gate: bool = False,
        scale: float | None = None,
        norm: TokenNorm = "layer",
        norm_place: NormPlace = "pre",
        norm_eps: float = 1e-5,
        unit_offset: bool = False,
        mlp: TokenMLP = "gelu",
        hidden: int | None = None,
        experts: int = 8,
        top_k: int = 2,
        renormalise: bool = True,
        router_noise: float = 0.0,
        balance: float = 0.01,
        scale_embedding: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, block_size=block_size, num_layers=num_layers, embed_dim=embed_dim)
        if not 0 <= attention_dropout < 1:
            raise BadInput("attention_dropout", attention_dropout, "at least 0, less than 1")
        if final_softcap is not None and not final_softcap > 0:
            raise BadInput("final_softcap", final_softcap, "above 0, or null")
        if softmax_layers and max(softmax_layers) >= num_layers:
            raise BadInput("softmax_layers", softmax_layers, f"blocks from 0 to {num_layers - 1}")
        self.block_size, self.tie_weights = block_size, tie_weights
        mixers = Mixers(
            embed_dim, num_heads, True, attention_dropout, bias, backend, mixer, softmax_every, softmax_layers, conv,
            feature_map, num_kv_heads, head_dim, position, rope_base, rope_scaling, window, full_every, sinks, qk_norm,
            softcap, gate, scale,
        )  # fmt: skip
        options = Blocks(
            mixers, dropout, norm, norm_place, norm_eps, unit_offset, mlp, 4, hidden, experts, top_k, renormalise,
            router_noise, balance,
        )  # fmt: skip
        places = block_size if position == "learned" else 0
        factor = math.sqrt(embed_dim) if scale_embedding else 1.0
        self.embedding = _Embedding(vocab_size, block_size, places, embed_dim, dropout, factor)
        self.blocks = nn.ModuleList(options.make(number) for number in range(num_layers))
        self.stages = tuple(f"blocks.{number}" for number in range(num_layers))
        self.norm = options.last_norm()
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.cap = None if final_softcap is None else SoftCap(final_softcap)
        self._draw_weights(num_layers)
        if tie_weights:
            self.head.weight = self.embedding.tokens.weight

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each option that has one."""
        parameters = inspect.signature(cls).parameters.values()
        return {x.name: x.default for x in parameters if x.default is not inspect.Parameter.empty}

    @classmethod
    def from_hf(cls, model: Any, **options: Any) -> "GPT":
        """Return a GPT with a transformers model's settings and weights: of GPT-2, Llama, Mistral, Qwen3 or Gemma 2.

        Args:
            model: a causal language model, whose type it keeps, or the name or folder of one, read in float32.
            options: that change none of its weights, such as `backend`, or a smaller `block_size` of rotary positions.

        Raises:
            Missing: transformers is not installed.
            BadInput: a model of another family, or one that computes what GPT does not.
        """
        if isinstance(model, str | Path):
            with import_transformers(str(model), "a causal language model") as transformers:
                kind, folder = transformers.AutoModelForCausalLM, model_folder(str(model))
                model = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
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
        """Logits (B, T, V) of tokens (B, T) of any integer type; BadInput if T is more than the block size.

        Of rows with several texts, `starts` (B, T) has the place of each token's first one: it is at position 0, and
        texts don't attend to one another.
        """
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
        return partial(self._last, caches=[mixer.new_cache(capacity, padding) for mixer in self._mixers])

    @property
    def _mixers(self) -> list[Any]:
        return [block.attention for block in self.blocks]

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes that all blocks keep of a text of so many tokens while it is continued."""
        return sum(mixer.cache_bytes(tokens, element_size) for mixer in self._mixers)

    def _last(self, tokens: Tensor, caches: Sequence[Any]) -> Tensor:
        """Compute logits (B, V) after the last of tokens (B, T), which follow any cached ones."""
        start, padding = caches[0].length, caches[0].padding
        x = self.embedding(tokens, start, padding)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return self._logits(x[:, -1])


class _Embedding(nn.Module):
    """Tokens as vectors times a factor, with learned positions if there are places for them."""

    def __init__(
        self, vocab_size: int, block_size: int, places: int, embed_dim: int, dropout: float, factor: float
    ) -> None:
        super().__init__()
        self.block_size, self.factor = block_size, factor
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(places, embed_dim) if places else None
        self.noise = Dropout(dropout, 0)

    def forward(
        self, tokens: Tensor, start: int = 0, padding: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """(B, T) -> (B, T, D), the first token at `start`, less a text's `padding` (B,), or `starts` (B, T)."""
        end = start + tokens.shape[1]
        if end > self.block_size and padding is None:
            raise BadInput("tokens", tuple(tokens.shape), f"texts of at most {self.block_size}, the block size")
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
