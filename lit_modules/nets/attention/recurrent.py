"""What linear attention of all kinds shares: projections, convolution, heads, and a state in place of a cache."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.attention.chunks import find_starts
from lit_modules.nets.attention.convolution import ShortConvolution
from lit_modules.nets.attention.heads import check_heads
from lit_modules.nets.attention.mixer_cache import MixerCache
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.attention.rms_norm import RMSNorm

# (q, k, v, *gates, state=, starts=, ...) -> outputs (B, H, T, e) and the state (B, H, f, e) after the last token
Form = Callable[..., tuple[Tensor, Tensor]]


class State(MixerCache):
    """What a mixer keeps of the tokens that it has seen, whose size does not grow with them; for generation.

    Attributes:
        memory: (B, H, f, e), the recurrent state.
        inputs: (B, W - 1, C), the last inputs of the convolution.
    """

    def __init__(self, padding: Tensor | None = None) -> None:
        super().__init__(padding)
        self.memory: Tensor | None = None
        self.inputs: Tensor | None = None

    def starts(self, count: int, device: torch.device) -> Tensor | None:
        """Return where the texts of the next `count` tokens begin, (B, count), counted from the first of these."""
        if self.padding is None:
            return None
        places, padding = torch.arange(self.length, self.length + count, device=device), self.padding[:, None]
        return padding.where(places >= padding, 0) - self.length

    def check(self, x: Tensor) -> None:
        """Raise BadInput if these tokens can't follow those that were seen."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise BadInput("", "a cache holds no gradients", "a call under torch.no_grad()")
        if self.memory is not None and len(x) != len(self.memory):
            raise BadInput("", f"{len(x)} texts", f"the {len(self.memory)} whose tokens are cached")

    def update(self, count: int, memory: Tensor, inputs: Tensor | None) -> None:
        """Keep the state after `count` more tokens."""
        self.length, self.memory = self.length + count, memory
        self.inputs = None if inputs is None else inputs.clone()  # not a view of all tokens


class RecurrentMixer(nn.Module):
    """The base of causal mixers with a state: q, k, v from one matrix, a short convolution on them, heads, `out`.

    It trains by the chunked form and generates token by token by the recurrent one. What lies between the projections
    is computed in float32 at least, also under autocast, as is the state.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, a divisor of D; heads have width d = D / H.
        conv: width of the convolution on q, k and v, see `ShortConvolution`; 0 for none.
        chunk: tokens of a chunk; the outputs don't depend on it.
        bias: whether the projections to q, k, v and out have one.
    """

    causal: bool = True
    has_state: ClassVar[bool] = True
    chunked: Form
    recurrent: Form

    def __init__(self, embed_dim: int, num_heads: int, conv: int, chunk: int, bias: bool) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, None, None)
        if chunk < 1:
            raise BadInput("chunk", chunk, "at least 1 token")
        if conv < 0:
            raise BadInput("conv", conv, "a width of at least 1, or 0 for no convolution")
        self.embed_dim, self.num_heads, self.head_dim, self.chunk = embed_dim, num_heads, embed_dim // num_heads, chunk
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias)
        self.conv = ShortConvolution(3 * embed_dim, conv) if conv else None
        self.out = nn.Linear(embed_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: State | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D).

        With a cache, made by `new_cache`, x holds the tokens after those it has seen. A mask says where texts begin or
        what is padding, see `find_starts`; outputs at padding mean nothing.

        Raises:
            BadInput: a nested tensor, a mask of another kind or beside a cache, or a cache of other texts.
        """
        if x.is_nested:
            raise BadInput("", "nested tensors", "texts of one length (B, T, D), with a mask of their padding")
        memory = before = None
        if cache is None:
            starts = find_starts(mask, *x.shape[:2])
        else:
            if not isinstance(cache, State):
                raise BadInput("cache", type(cache).__name__, f"what new_cache() of {type(self).__name__} makes")
            if mask is not None:
                raise BadInput("mask", tuple(mask.shape), "None beside a cache, which knows the padding")
            starts, memory, before = cache.starts(x.shape[1], x.device), cache.memory, cache.inputs
        projected = self.qkv(x)
        if cache is not None:
            cache.check(projected)
        (q, k, v), inputs = self._heads(projected, before, starts)
        gates = [widen(gate) for gate in self.gates(x)]
        with torch.autocast(x.device.type, enabled=False):
            one = cache is not None and x.shape[1] == 1
            form = self.recurrent if one else self.chunked
            options = {} if one else {"chunk": self.chunk}
            mixed, memory = form(*self.features(q, k), v, *gates, state=memory, starts=starts, **options)
        if cache is not None:
            cache.update(x.shape[1], memory, inputs)
        output: Tensor = self.out(self.finish(mixed.transpose(1, 2), x).to(projected.dtype).flatten(2))
        return output

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, H, T, T), what each token's output takes of each earlier one's value, before `finish`.

        They need not sum to 1, nor be above 0. Values are those after the convolution.
        """
        starts = find_starts(mask, *x.shape[:2])
        (q, k, _), _ = self._heads(self.qkv(x), None, starts)
        gates = [widen(gate) for gate in self.gates(x)]
        one_hot = torch.eye(x.shape[1], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
        with torch.autocast(x.device.type, enabled=False):  # outputs are linear in the values
            weights, _ = self.chunked(*self.features(q, k), one_hot, *gates, starts=starts, chunk=self.chunk)
        return weights

    def _heads(
        self, projected: Tensor, before: Tensor | None, starts: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return q, k and v (B, H, T, d) at 32 bits at least, and the last inputs of the convolution."""
        inputs = None
        if self.conv is not None:
            projected, inputs = self.conv(projected, before, starts)
        parts = [widen(part).unflatten(-1, (self.num_heads, -1)) for part in projected.chunk(3, -1)]
        return [part.transpose(1, 2).contiguous() for part in parts], inputs

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What the forms take as queries and keys (B, H, T, f), of those of the heads (B, H, T, d)."""
        return q, k

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the forms take beside q, k and v, (B, H, T, ...), of tokens (B, T, D)."""
        return ()

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """What `out` projects, (B, T, H, d), of the heads' outputs (B, T, H, d) and the tokens (B, T, D)."""
        return mixed

    def state_shape(self) -> tuple[int, int, int]:
        """(H, f, e), of the recurrent state of a text."""
        return self.num_heads, self.head_dim, self.head_dim

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> State:
        """Return an empty state for a batch of texts; it has no longest text, so `max_length` changes nothing."""
        return State(padding)

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes of a text's state, the same after any number of tokens."""
        heads, features, width = self.state_shape()
        inputs = 0 if self.conv is None else (self.conv.width - 1) * 3 * self.embed_dim
        return heads * features * width * max(element_size, 4) + inputs * element_size

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        """Nothing is cut under tensor parallelism: each rank computes all heads, and shares what is around."""
        return {}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, chunk={self.chunk}"


class GatedNorm(nn.Module):
    """RMSNorm of each head's output, times SiLU of a projection of the token, as in GLA and Gated DeltaNet.

    Args:
        embed_dim: D.
        head_dim: d.
        gate: whether there is the projection; else the norm alone.
        eps: of the norm.
    """

    def __init__(self, embed_dim: int, head_dim: int, gate: bool, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(head_dim, eps)
        self.gate = nn.Linear(embed_dim, embed_dim, bias=False) if gate else None

    def forward(self, mixed: Tensor, x: Tensor) -> Tensor:
        """(B, T, H, d) of heads' outputs (B, T, H, d), in float32 at least, and tokens (B, T, D)."""
        normed: Tensor = self.norm(mixed)
        if self.gate is None:
            return normed
        gate: Tensor = F.silu(widen(self.gate(x))).unflatten(-1, mixed.shape[-2:])
        return widen(normed) * gate
