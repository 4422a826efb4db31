"""Softmax in a window and linear attention beyond it (LoLCATs, Zhang et al. 2024, arXiv:2410.10254)."""

from typing import ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.attention.chunks import Chunks, find_starts, scan
from lit_modules.nets.attention.heads import check_heads
from lit_modules.nets.attention.linear import MAPS, FeatureMap, normalise, normalise_weights
from lit_modules.nets.attention.mixer_cache import MixerCache
from lit_modules.nets.attention.parts import InParts
from lit_modules.nets.attention.positions import Rotary
from lit_modules.nets.attention.precision import widen


class Heads(NamedTuple):
    """What attention computes with, of tokens (B, H, T, .)."""

    query: Tensor  # d wide, scaled and rotated
    key: Tensor
    value: Tensor  # e wide, the last of them 1
    query_map: Tensor  # f wide, features of the query
    key_map: Tensor

    def later(self, first: int) -> "Heads":
        """Leave out the queries before a place, whose keys stay."""
        return self._replace(query=self.query[:, :, first:], query_map=self.query_map[:, :, first:])


def parallel(
    x: Heads, window: int, share: Tensor, state: Tensor, starts: Tensor | None = None, linear: bool = True,
    least: float = 0.0,
) -> Tensor:  # fmt: skip
    """All weights at once: share · exp(q·k) for keys in the window, φ(q)·φ(k) for earlier ones, divided by their sum.

    Args:
        x: T keys and the last t queries.
        window: a query and the `window` - 1 keys before it; 0 for none.
        share: (H, 1, 1), the factor of the window's weights. Exponentials are those less the largest of the window.
        state: (B, H, f, e), sum of φ(k) vᵀ over earlier tokens than these.
        starts: (B, T) int64, the first place of each token's text, below 0 for one before these; None: before all.
        linear: whether tokens beyond the window count.
        least: the smallest value of φ(q)·φ(k).

    Returns:
        (B, H, t, e - 1).
    """
    weights = weights_of(x, window, share, starts, linear)
    mixed = weights @ x.value
    if linear:
        read = x.query_map @ state
        if starts is not None:
            read = read * (starts[:, -read.shape[2] :] < 0)[:, None, :, None]
        mixed = mixed + read
    return normalise(mixed, least_sum(window, share, least))


def weights_of(x: Heads, window: int, share: Tensor, starts: Tensor | None = None, linear: bool = True) -> Tensor:
    """Return (B, H, t, T), what the last t queries give to T keys, before the division by their sum."""
    count, length = x.query.shape[2], x.key.shape[2]
    j = torch.arange(length, device=x.key.device)
    distance = j[length - count :, None] - j
    same = None if starts is None else (starts[:, length - count :, None] == starts[:, None])[:, None]
    return _weigh(x.query @ x.key.mT, x.query_map @ x.key_map.mT if linear else None, distance, same, window, share)


def chunked(
    x: Heads, window: int, share: Tensor, state: Tensor, starts: Tensor | None = None, linear: bool = True,
    size: int = 64, least: float = 0.0,
) -> Tensor:  # fmt: skip
    """As `parallel`, in time and memory linear in T: a chunk's queries see it, the one before, and the state."""
    length, device = x.key.shape[2], x.key.device
    chunks = Chunks(length, max(size, window, 1), starts, device)
    heads = Heads(*(chunks.cut(part) for part in x))  # (B, H, n, C, .)
    size, count = heads.key.shape[3], heads.key.shape[2]
    previous = heads._replace(key=_shift(heads.key), value=_shift(heads.value), key_map=_shift(heads.key_map))
    pairs = [(previous, size), (heads, 0)]
    i = torch.arange(size, device=device)
    has_before = torch.arange(count, device=device).view(-1, 1, 1) > 0
    same_text = [has_before, torch.ones_like(has_before)]
    if starts is not None:
        filled = torch.cat([starts, starts[:, -1:].expand(-1, chunks.filling)], 1).unflatten(1, (-1, size))
        shifted = F.pad(filled, (0, 0, 1, 0), value=-2 - length)[:, :-1]
        same_text = [
            (filled[..., :, None] == keys[..., None, :])[:, None] & there
            for keys, there in zip((shifted, filled), same_text, strict=True)
        ]
    scores = torch.cat([heads.query @ keys.key.mT for keys, _ in pairs], -1)
    products = torch.cat([heads.query_map @ keys.key_map.mT for keys, _ in pairs], -1) if linear else None
    distance = torch.cat([i[:, None] + offset - i for _, offset in pairs], 1)
    same = torch.cat([mask.expand(*mask.shape[:-2], size, size) for mask in same_text], -1)
    weights = _weigh(scores, products, distance, same, window, share[..., None])
    mixed = weights @ torch.cat([keys.value for keys, _ in pairs], 3)
    if linear:
        factors = chunks.passes(heads.key.new_ones(1, 1, count, 1, 1))
        before, _ = scan(factors, chunks.writes(heads.key_map).mT @ heads.value, state)
        read = heads.query_map @ torch.cat([state[:, :, None], before], 2)[:, :, :-1]  # before the previous chunk
        if starts is not None:
            begin = (torch.arange(count, device=device) - 1).clamp(min=0) * size
            read = read * (filled < begin[:, None])[:, None, ..., None]
        mixed = mixed + read
    return normalise(chunks.join(mixed), least_sum(window, share, least))


def least_sum(window: int, share: Tensor, least: float) -> float | Tensor:
    """Return what no sum of weights is less than: the window's largest is its share times 1, and holds the token."""
    return share.detach() if window else least


def _weigh(
    scores: Tensor, products: Tensor | None, distance: Tensor, same: Tensor | None, window: int, share: Tensor
) -> Tensor:
    """Return the weights of keys at a distance from queries, which is below 0 for later ones."""
    near, far = (distance >= 0) & (distance < window), distance >= window
    if same is not None:
        near, far = near & same, far & same
    weights = torch.zeros_like(scores)
    if window:
        scores = scores.masked_fill(~near, -torch.inf)
        weights = share * (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights if products is None else weights + products * far


def _shift(x: Tensor) -> Tensor:
    """Give each chunk (B, H, n, C, d) the one before it, and the first one zeros."""
    return F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1]


class WindowCache(MixerCache):
    """The last tokens' keys and values, and the sum of all before them.

    Attributes:
        near: the last tokens, as many as the window holds beside the next one; None at the start.
        state: (B, H, f, e), of the tokens before these.
    """

    def __init__(self, padding: Tensor | None = None) -> None:
        super().__init__(padding)
        self.near: Heads | None = None
        self.state: Tensor | None = None

    @property
    def held(self) -> int:
        """Tokens whose keys are kept."""
        return 0 if self.near is None else self.near.key.shape[2]

    def take_back(self, length: int) -> None:
        if self.near is None or self.held < self.length:
            expected = f"{self.length}, all tokens: those that left the window are kept as their sum"
            raise BadInput("length", length, expected)
        self.near = Heads(*(part[:, :, :length] for part in self.near))

    def starts(self, count: int, device: torch.device) -> Tensor | None:
        """Return where the texts of the kept tokens and the next `count` begin, from the first that is kept."""
        if self.padding is None:
            return None
        first = self.length - self.held
        places, padding = torch.arange(first, self.length + count, device=device), self.padding[:, None]
        return padding.where(places >= padding, 0) - first

    def extend(self, x: Heads) -> Heads:
        """Return heads whose keys are those kept, and the new ones."""
        if torch.is_grad_enabled() and x.key.requires_grad:
            raise BadInput("", "a cache holds no gradients", "a call under torch.no_grad()")
        if self.near is None:
            return x
        if len(x.key) != len(self.near.key):
            raise BadInput("", f"{len(x.key)} texts", f"the {len(self.near.key)} whose tokens are cached")
        joined = {
            name: torch.cat([getattr(self.near, name), getattr(x, name)], 2) for name in ("key", "value", "key_map")
        }
        return x._replace(**joined)

    def update(self, x: Heads, new: int, window: int, state: Tensor, starts: Tensor | None) -> None:
        """Keep the last tokens of x, of which `new` are new, and add those that leave the window to the state."""
        leaving = max(x.key.shape[2] - max(window - 1, 0), 0)
        key_map, value = x.key_map[:, :, :leaving], x.value[:, :, :leaving]
        if starts is not None:
            last = starts[:, -1:]
            key_map = key_map * (starts[:, :leaving] == last)[:, None, :, None]
            state = state * (last < 0)[:, :, None, None]
        self.state, self.length = state + key_map.mT @ value, self.length + new
        self.near = Heads(*(part[:, :, leaving:] for part in x._replace(query=x.key, query_map=x.key_map)))


class WindowedLinearAttention(InParts, nn.Module):
    """Causal attention with softmax weights in a window and weights φ(q)·φ(k) beyond it, divided by the sum of both.

    o_i = (Σ_near γ exp(s_ij - c_i) v_j + Σ_far φ(q_i)·φ(k_j) v_j) / (the same without v), s_ij = q_i·k_j / √d, c_i the
    largest of the window, γ = sigmoid of a parameter of each head. With a window as long as the text it is softmax
    attention. Layers `qkv` and `out` are those of `SelfAttention` with the same options.

    Source: Zhang et al. 2024, "LoLCATs: On Low-Rank Linearizing of Large Language Models" (arXiv:2410.10254), equation
    6, with one feature map for queries and one for keys, of each head.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, heads of queries.
        window: w, a token and the w - 1 before it; 0 leaves linear attention alone.
        feature_map: φ, see `LinearAttention`.
        num_kv_heads: heads of keys and values, a divisor of H; None for H.
        head_dim: d, width of a head; None for D / H.
        position: rotations of queries and keys, before φ too; places count from the start of a text.
        chunk: tokens of a chunk, at least; the outputs don't depend on it.
        bias: whether the projections have one.
        scale: of s; None for 1 / √d.
        qkv_bias: whether the projections to queries, keys and values have a bias; None for `bias`.
    """

    causal: ClassVar[bool] = True
    has_state: ClassVar[bool] = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: int = 64,
        feature_map: FeatureMap = "hedgehog",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: Rotary | None = None,
        chunk: int = 64,
        bias: bool = True,
        scale: float | None = None,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        if window < 0:
            raise BadInput("window", window, "at least 1 token, or 0 for none")
        if chunk < 1:
            raise BadInput("chunk", chunk, "at least 1 token")
        if feature_map not in MAPS:
            raise BadInput("feature_map", feature_map, f"one of {', '.join(get_args(FeatureMap))}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads or num_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.window, self.position, self.chunk = window, position, chunk
        self.scale = self.head_dim**-0.5 if scale is None else scale
        rows = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(embed_dim, rows, bias if qkv_bias is None else qkv_bias)
        self.query_map, self.key_map = (MAPS[feature_map](num_heads, self.head_dim) for _ in range(2))
        self.window_share = nn.Parameter(torch.zeros(num_heads))
        self.out = nn.Linear(num_heads * self.head_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: WindowCache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D).

        With a cache, made by `new_cache`, x holds the tokens after those it has seen. A mask says where texts begin or
        what is padding, see `find_starts`; outputs at padding mean nothing.

        Raises:
            BadInput: a nested tensor, a mask of another kind or beside a cache, or a cache of other texts.
        """
        if x.is_nested:
            raise BadInput("", "nested tensors", "texts of one length (B, T, D), with a mask of their padding")
        if cache is not None and not isinstance(cache, WindowCache):
            raise BadInput("cache", type(cache).__name__, f"what new_cache() of {type(self).__name__} makes")
        if cache is not None and mask is not None:
            raise BadInput("mask", tuple(mask.shape), "None beside a cache, which knows the padding")
        count = x.shape[1]
        starts = find_starts(mask, *x.shape[:2]) if cache is None else cache.starts(count, x.device)
        heads = self._heads(x, starts, cache)
        with torch.autocast(x.device.type, enabled=False):
            if cache is not None:
                mixed = self._cached(heads, cache, starts, count)
            else:
                options, linear = self._options(heads, None), self.part != "window"
                mixed = chunked(heads, *options, starts, linear, self.chunk, self.key_map.least)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2).to(x.dtype))
        return output

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, H, T, T), what each token gives to each earlier one, with sum 1 over these."""
        starts = find_starts(mask, *x.shape[:2])
        heads = self._heads(x, starts, None)
        window, share, _ = self._options(heads, None)
        weights = weights_of(heads, window, share, starts, self.part != "window")
        return normalise_weights(weights, least_sum(window, share, self.key_map.least))

    def _cached(self, heads: Heads, cache: WindowCache, starts: Tensor | None, count: int) -> Tensor:
        known = cache.held
        joined = cache.extend(heads)
        options, linear = self._options(heads, cache.state), self.part != "window"
        if known or count == 1:
            mixed = parallel(joined, *options, starts, linear, self.key_map.least)
        else:  # no key is kept: the texts begin
            mixed = chunked(joined, *options, starts, linear, self.chunk, self.key_map.least)
        cache.update(joined, count, options[0], options[2], starts)
        return mixed

    def _options(self, heads: Heads, state: Tensor | None) -> tuple[int, Tensor, Tensor]:
        """The window, its share and the state before these tokens, as the forms take them."""
        if state is None:
            state = heads.key.new_zeros(*heads.key.shape[:2], heads.key_map.shape[3], heads.value.shape[3])
        window = 0 if self.part == "linear" else self.window
        return window, self.window_share.sigmoid().to(heads.key.dtype)[:, None, None], state

    def _heads(self, x: Tensor, starts: Tensor | None, cache: WindowCache | None) -> Heads:
        """Project tokens to heads at 32 bits at least, with positions from the start of each text."""
        rows = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        parts = self.qkv(x).split(rows, -1)
        query, key, value = (widen(part).unflatten(-1, (-1, self.head_dim)) for part in parts)  # (B, T, heads, d)
        with torch.autocast(x.device.type, enabled=False):
            if self.position is not None:
                past = 0 if cache is None else cache.held
                places = torch.arange(past, past + x.shape[1], device=x.device)
                if starts is not None:
                    places = places - starts[:, past:]
                elif cache is not None:
                    places = places + cache.length - past
                query, key = self.position.rotate(places, query, key)
            groups = self.num_heads // self.num_kv_heads
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
            maps = self.query_map(query), self.key_map(key)
            return Heads(query * self.scale, key, F.pad(value, (0, 1), value=1.0), *maps)

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> WindowCache:
        """Return an empty cache for a batch of texts; it has no longest text, so `max_length` changes nothing."""
        return WindowCache(padding)

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes that a text takes after so many tokens: window and state."""
        width, features = self.head_dim + 1, self.key_map.width
        near = min(tokens, max(self.window - 1, 0)) * (self.head_dim + width + features)
        return self.num_heads * (near + features * width) * max(element_size, 4)

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        """Nothing is cut under tensor parallelism: each rank computes all heads, and shares what is around."""
        return {}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, window={self.window}, part={self.part}"
