"""Multi-head self-attention (Vaswani et al. 2017) with a choice of torch's kernels, and the forms of later models."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from apprentice.contract import Joined
from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.attend import DropsWeights, attend, attention_weights
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.cached_attention import CachedAttention
from lit_modules.nets.attention.form import Backend, Form, QKNorm
from lit_modules.nets.attention.heads import check_heads, of_rank
from lit_modules.nets.attention.masks import CausalMask, visible
from lit_modules.nets.attention.positions import Alibi, Position, Rotary, alibi_bias
from lit_modules.nets.attention.rms_norm import RMSNorm


class SelfAttention(CachedAttention, DropsWeights):
    """Multi-head self-attention, softmax(s q kᵀ) v, with queries, keys and values from one matrix.

    Dropout of attention weights is keyed as the suite's other dropout is. For that they are written out, (B, H, T, T);
    a kernel that is chosen by its name, but math, drops them by itself and draws from torch's generator. Under
    `torch.compile` a refusal may be a compiler error that quotes torch's.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, heads of queries; a divisor of D, unless `head_dim` is given.
        causal: whether a token attends only to itself and earlier tokens.
        dropout: probability that a weight is zero, in training; below 1.
        bias: whether the projections have one.
        backend: the kernel; `auto` leaves the choice to torch, another is used or refused, never replaced.
        num_kv_heads: K, heads of keys and values, a divisor of H: query head h uses h // (H / K) (grouped queries,
            arXiv:2305.13245; 1: multi-query, arXiv:1911.02150). None for H.
        position: `Rotary` or `Alibi`, inside this layer; None for none.
        window: a token attends to itself and the `window - 1` before it (Mistral, arXiv:2310.06825); causal only.
        sinks: the first tokens of a text stay visible beyond the window (StreamingLLM, arXiv:2309.17453), at their
            true distance.
        qk_norm: whether an `RMSNorm` of each head's queries and keys comes before the rotation (Qwen3,
            arXiv:2505.09388); "width": one norm of all heads' queries and one of their keys (OLMo 2,
            arXiv:2501.00656), with which ranks do not share the layer.
        softcap: c of scores c · tanh(score / c), before the mask (Gemma 2, arXiv:2408.00118). Needs `auto` or `math`.
        gate: whether the heads' output is multiplied by the sigmoid of a projection of x (arXiv:2505.06708).
        head_dim: d, width of a head; None for D / H.
        scale: s of scores; None for 1 / √d.
        layer: number of its dropout among the dropout layers of a net.
        qkv_bias: whether the projections to queries, keys and values have a bias (Qwen2); None for `bias`.
        norm_eps: epsilon of the norms of queries and keys.
        unit_offset: these norms multiply by 1 + weight (Gemma 3).

    Raises:
        BadInput: a value can't be used, or two can't be combined.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        backend: Backend = "auto",
        num_kv_heads: int | None = None,
        position: Position | None = None,
        window: int | None = None,
        sinks: int = 0,
        qk_norm: QKNorm = False,
        softcap: float | None = None,
        gate: bool = False,
        head_dim: int | None = None,
        scale: float | None = None,
        layer: int = 0,
        qkv_bias: bool | None = None,
        norm_eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        turning = position.width(self.head_dim) if isinstance(position, Rotary) else 2
        if turning % 2 or not turning:
            raise BadInput("position", "Rotary", f"heads of an even width; theirs is {turning}")
        _check_window(causal, window, sinks)
        if qk_norm not in (False, True, "width"):
            raise BadInput("qk_norm", qk_norm, "true, false or width")
        self.form = Form(scale, softcap, backend)
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.noise = Dropout(dropout, layer)
        self.position, self.window, self.sinks = position, window, sinks
        rows = [heads * self.head_dim for heads in (num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.qkv = nn.Linear(embed_dim, sum(rows), bias if qkv_bias is None else qkv_bias)
        # If several ranks compute it: its rows are of three matrices, and the rows of a head stay together.
        cast("Joined", self.qkv).joined = tuple(rows), self.num_kv_heads
        self.qk_norm = qk_norm
        widths = rows[:2] if qk_norm == "width" else [self.head_dim] * 2
        norms = [RMSNorm(width, norm_eps, unit_offset) if qk_norm else None for width in widths]
        self.q_norm, self.k_norm = norms
        self.gate = nn.Linear(embed_dim, rows[0], bias) if gate else None
        self.out = nn.Linear(rows[0], embed_dim, bias)

    @property
    def backend(self) -> Backend:
        """The kernel."""
        return self.form.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self.form.backend = backend

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which may be a jagged nested tensor: texts of unequal lengths.

        With a cache, x holds the tokens after the cached ones, and attends to these too. A mask narrows what a query
        sees: boolean, true where it attends to a key, or floating point to be added to scores, (B, H, T, T) with any
        size 1; or boolean (B, T), false for tokens of padding. A query that sees nothing gets 0 from its heads.

        Raises:
            BadInput: the backend has no kernel for this input, with torch's reasons; the mask has another shape; the
                cache is full, or passed to attention that is not causal, with jagged texts, a mask or gradients; a
                nested tensor is strided, or of a form that has no kernel for it.
        """
        self.check_input(x, cache, mask)
        if x.is_nested and not self._has_jagged_kernel(x):
            return self._pad(x)
        seen: Tensor | CausalMask | None
        if cache is None:
            query, key, value = self._heads(x)
            seen, empty = self._mask(x, query, mask)
            causal = self.causal and seen is None
        else:
            past, empty = cache.length, None
            query, key, value = self._heads(x, past)
            key, value = cache.append(key, value)
            seen = self._cached_mask(x, query, cache)
            causal = seen is None and not past  # torch's `is_causal` would count from the first token
        mixed = attend(query, key, value, self.form, seen, causal, self.drop(self.num_heads, self.qkv))
        if empty is not None:
            mixed = mixed.where(~empty, 0.0)
        mixed = mixed.transpose(1, 2).flatten(-2)
        if self.gate is not None:
            mixed = mixed * self.gate(x).sigmoid()
        output: Tensor = self.out(mixed)
        return output

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, T, T) of tokens (B, T, D), without dropout; 0 where a query sees nothing.

        They are computed apart from `forward`, since no kernel returns them.
        """
        self.check_input(x, None, mask)
        if x.is_nested:
            raise BadInput("x", "nested tensors", "texts of one length (B, T, D)")
        query, key, _ = self._heads(x)
        seen, empty = self._mask(x, query, mask)
        seen = seen.tensor(x.shape[1], x.device) if isinstance(seen, CausalMask) else seen
        weights = attention_weights(query, key, self.form, seen, self.causal and seen is None)
        return weights if empty is None else weights.where(~empty, 0.0)

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes that a text's cache takes after so many tokens."""
        kept = tokens if self.window is None else min(tokens, self.window + self.sinks)
        return 2 * self.num_kv_heads * self.head_dim * kept * element_size

    def parallel_layers(self) -> dict[str, ParallelStyle]:
        """How ranks share this module, by the paths of its layers: each computes some heads."""
        if self.qk_norm == "width":
            return {}  # each rank computes all heads, which are normed together
        plan: dict[str, ParallelStyle] = {"qkv": ColwiseParallel()}
        if self.q_norm is not None:
            plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in ("q_norm", "k_norm")}
        if self.gate is not None:
            plan["gate"] = ColwiseParallel()
        return plan | {"out": RowwiseParallel()}

    def check_input(self, x: Tensor, cache: Cache | None, mask: Tensor | None) -> None:
        if x.is_nested and x.layout != torch.jagged:
            raise BadInput("", "nested tensors", "torch.nested.nested_tensor(texts, layout=torch.jagged)")
        if cache is not None:
            if x.is_nested:
                raise BadInput("cache", "a Cache", "None, but for causal attention over texts of one length (B, T, D)")
            self.check_cache(cache, mask)
        if x.is_nested and mask is not None:
            raise BadInput("mask", "with nested tensors", "texts of one length (B, T, D), padded and masked")

    def _has_jagged_kernel(self, x: Tensor) -> bool:
        """Return whether torch has a kernel for jagged texts in this form: on a CPU there is none for causal ones."""
        plain = self.form.softcap is None and self.window is None and not isinstance(self.position, Alibi)
        return (
            plain
            and not callable(self.drop(self.num_heads, self.qkv))
            and self.backend != "flex"
            and not (self.causal and (x.device.type == "cpu" or self.backend == "math"))
        )

    def _pad(self, x: Tensor) -> Tensor:
        """Compute jagged texts as padded ones, whose tokens see none of the padding."""
        values, offsets = _split_jagged(x)
        lengths = offsets.diff()
        present = torch.arange(int(lengths.max()), device=x.device) < lengths[:, None]  # (B, T)
        padded = values.new_zeros(*present.shape, x.shape[-1]).index_put((present,), values)
        output = self.forward(padded, mask=None if self.causal else present)
        return torch.nested.nested_tensor_from_jagged(output[present], offsets)

    def _heads(self, x: Tensor, past: int = 0) -> list[Tensor]:
        """Project tokens (B, T, D) to queries, keys and values (B, heads, T, d) of all heads or this rank's."""
        projected, groups = self.qkv(x), self.num_heads // self.num_kv_heads
        plain = groups == 1 and self.q_norm is None and not isinstance(self.position, Rotary)
        if x.is_nested and not plain:
            return self._jagged_heads(projected)
        if groups == 1:
            parts = projected.chunk(3, -1)
        else:
            rows = projected.shape[-1] // (groups + 2)  # of this rank's keys
            parts = projected.split([groups * rows, rows, rows], -1)
        if x.is_nested:
            parts = self._contiguous(parts)
        heads = [part.unflatten(-1, (-1, self.head_dim)) for part in parts]
        if not plain:
            heads = self._place(heads, torch.arange(past, past + x.shape[1], device=x.device))
        return [part.transpose(1, 2) for part in heads]

    def _place(self, heads: list[Tensor], places: Tensor) -> list[Tensor]:
        """Norm and rotate queries and keys (..., T, heads, d) of tokens at places (T,)."""
        query, key, value = heads
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self._norm(self.q_norm, query), self._norm(self.k_norm, key)
        if isinstance(self.position, Rotary):
            query, key = self.position.rotate(places, query, key)
        return [query, key, value]

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Norm each head of x (..., heads, d), or all at once."""
        normed: Tensor = norm(x.flatten(-2)).unflatten(-1, x.shape[-2:]) if self.qk_norm == "width" else norm(x)
        return normed

    def _jagged_heads(self, projected: Tensor) -> list[Tensor]:
        """Do the same for a jagged projection, whose kernels take as many heads of keys as of queries."""
        values, offsets = _split_jagged(projected)
        rows = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        heads = [part.unflatten(-1, (-1, self.head_dim)) for part in values.split(rows, -1)]  # (tokens, heads, d)
        starts = offsets[:-1].repeat_interleave(offsets.diff(), output_size=len(values))
        heads = self._place(heads, torch.arange(len(values), device=values.device) - starts)
        groups = self.num_heads // self.num_kv_heads
        heads = [heads[0], *(part.repeat_interleave(groups, 1) if groups > 1 else part for part in heads[1:])]
        nested = [torch.nested.nested_tensor_from_jagged(part.flatten(1), offsets) for part in heads]
        return [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self._contiguous(nested)]

    def _contiguous(self, parts: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
        x = parts[0]
        if x.is_cuda and x.dtype != torch.float64 and self.backend != "math":
            return [*parts]
        return [part.contiguous() for part in parts]  # for jagged texts torch's math kernel takes nothing else

    def _mask(self, x: Tensor, query: Tensor, mask: Tensor | None) -> tuple[Tensor | CausalMask | None, Tensor | None]:
        """Return what queries of a whole text see, None for what `causal` says; and those that see nothing."""
        if x.is_nested:
            return None, None
        places = torch.arange(x.shape[1], device=x.device)
        if mask is not None:
            mask, empty = self.narrow_mask(x, mask, self.num_heads, query.dtype)
            empty = None if empty is None else of_rank(empty, query.shape[1], self.qkv)
            return self._add_bias(mask, places, places, query), empty
        slopes = self._slopes(query)
        if not self.causal:
            return None if slopes is None else alibi_bias(places, places, slopes), None
        window = None if self.window is None or self.window >= x.shape[1] else self.window
        if window is None and slopes is None:
            return None, None
        return CausalMask(window, 0 if window is None else self.sinks, slopes), None

    def _cached_mask(self, x: Tensor, query: Tensor, cache: Cache) -> Tensor | CausalMask | None:
        """Return what tokens see that the cache has just got, None for what a causal kernel does by itself."""
        if cache.length == x.shape[1] and cache.padding is None:
            return self._mask(x, query, None)[0]
        mask, slopes = cache.mask(x.shape[1], x.device, self.window, self.sinks), self._slopes(query)
        if slopes is None:
            return mask
        places = cache.places(x.shape[1], x.device)
        return self._add_bias(visible(*places) if mask is None else mask, *places, query)

    def _slopes(self, query: Tensor) -> Tensor | None:
        """Return the slopes of `Alibi` for these queries, of all heads or this rank's; None without."""
        if not isinstance(self.position, Alibi):
            return None
        slopes = torch.tensor(self.position.slopes(self.num_heads), dtype=query.dtype, device=query.device)
        return of_rank(slopes[None, :, None, None], query.shape[1], self.qkv).flatten()

    def _add_bias(self, mask: Tensor | None, queries: Tensor, keys: Tensor, query: Tensor) -> Tensor | None:
        """Add the bias of `Alibi` for queries and keys at these places to a mask; both for the heads of `query`."""
        mask, slopes = None if mask is None else of_rank(mask, query.shape[1], self.qkv), self._slopes(query)
        if slopes is None or mask is None:
            return mask
        bias = alibi_bias(queries, keys, slopes)
        return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask

    def extra_repr(self) -> str:
        facts = f"num_heads={self.num_heads}, causal={self.causal}, backend={self.backend}"
        options = {
            "num_kv_heads": self.num_kv_heads if self.num_kv_heads != self.num_heads else None,
            "position": self.position, "window": self.window, "sinks": self.sinks or None,
            "softcap": self.form.softcap, "scale": self.form.scale,
        }  # fmt: skip
        return ", ".join([facts, *(f"{name}={value}" for name, value in options.items() if value is not None)])


def _check_window(causal: bool, window: int | None, sinks: int) -> None:
    if window is not None and not causal:
        raise BadInput("window", window, "None, but for causal attention")
    if window is not None and window < 1:
        raise BadInput("window", window, "at least 1, the token itself")
    if sinks < 0 or (sinks and window is None):
        raise BadInput("sinks", sinks, "0 without a window" if sinks > 0 else "at least 0")


def _split_jagged(texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens (n, D) of B jagged texts, and where each begins and the last ends, (B + 1,)."""
    nested: Any = texts  # torch does not declare what a nested tensor has beside others
    return nested.values(), nested.offsets()
