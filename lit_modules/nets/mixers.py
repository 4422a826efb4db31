"""What mixes tokens in a block: attention by the names of its options, or a user's own mixer."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.delta import DeltaAttention
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.gated import GatedLinearAttention
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.linear import LinearAttention
from lit_modules.nets.attention.positions import Alibi, Position, Rotary
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.attention.windowed import WindowedLinearAttention
from lit_modules.nets.block_options import BlockOptions

NOISE = 1 << 16  # number of the first block's dropout of attention weights, beyond those of all other dropout layers
WINDOW = 64  # of the mixer windowed, if none is given


class TokenMixer(Protocol):
    """What mixes tokens in a block: a module with the width of tokens and this forward.

    Without the methods of `CachedMixer` a net with it writes by computing all tokens again for each new one.
    """

    embed_dim: int  # D

    def forward(self, x: Tensor, cache: Any | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which follow those that a cache of this mixer holds, if one is given.

        A mask narrows what a token sees, see `SelfAttention.forward`; packed texts need it.
        """


@runtime_checkable
class CachedMixer(Protocol):
    """A mixer that keeps what it needs of earlier tokens when a text is continued."""

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> Any:
        """Return an empty cache for texts of up to so many tokens, of which the first `padding` (B,) are none.

        It has the attributes `length`, the number of tokens in it, and `padding`.
        """


@runtime_checkable
class MeasuredMixer(Protocol):
    """A mixer whose cache has a known size, for the table's columns of decoding."""

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes of a cache with so many tokens of a text, its elements of this size."""


def make_mixer(options: BlockOptions, number: int) -> nn.Module:
    """Return the mixer of the block `number`, from 0; BadInput if an own one is no `TokenMixer` of this width."""
    if options.has_softmax(number):
        return _softmax(options, number)
    return MIXERS[options.mixer](options, number) if isinstance(options.mixer, str) else _make_custom(options)


def _softmax(o: BlockOptions, number: int) -> nn.Module:
    is_full = o.mixer == "windowed" or (o.full_every is not None and (number + 1) % o.full_every == 0)
    window = None if is_full else o.window
    return SelfAttention(
        o.embed_dim, o.num_heads, o.causal, o.attention_dropout, o.bias, o.backend,
        num_kv_heads=o.num_kv_heads, position=_position(o, number, window), qkv_bias=o.qkv_bias,
        window=window, sinks=0 if is_full else o.sinks, qk_norm=o.qk_norm,
        softcap=o.softcap, gate=o.gate, head_dim=o.head_dim, scale=o.scale, layer=NOISE + number,
        unit_offset=o.unit_offset, **_without_none(norm_eps=o.norm_eps if o.norm == "rms" else None),
    )  # fmt: skip


def _latent(o: BlockOptions, number: int) -> nn.Module:
    return LatentAttention(
        o.embed_dim, o.num_heads, o.causal, dropout=o.attention_dropout, bias=o.bias, backend=o.backend,
        head_dim=o.head_dim, position=_rotary(o), scale=o.scale, layer=NOISE + number,
    )  # fmt: skip


def _differential(o: BlockOptions, number: int) -> nn.Module:
    return DifferentialAttention(
        o.embed_dim, o.num_heads, o.causal, o.bias, o.backend, num_kv_heads=o.num_kv_heads, head_dim=o.head_dim,
        position=_rotary(o), scale=o.scale, layer=number,
    )  # fmt: skip


def _windowed(o: BlockOptions, _number: int) -> nn.Module:
    window = WINDOW if o.window is None else o.window
    return WindowedLinearAttention(
        o.embed_dim, o.num_heads, window, num_kv_heads=o.num_kv_heads, head_dim=o.head_dim, position=_rotary(o),
        bias=o.bias, scale=o.scale, qkv_bias=o.qkv_bias, **_without_none(feature_map=o.feature_map),
    )  # fmt: skip


def _linear(o: BlockOptions, _number: int) -> nn.Module:
    options = _without_none(conv=o.conv, feature_map=o.feature_map)
    return LinearAttention(o.embed_dim, o.num_heads, bias=o.bias, causal=o.causal, **options)


def _gated(o: BlockOptions, _number: int) -> nn.Module:
    return GatedLinearAttention(o.embed_dim, o.num_heads, bias=o.bias, **_without_none(conv=o.conv))


def _delta(o: BlockOptions, _number: int) -> nn.Module:
    return DeltaAttention(o.embed_dim, o.num_heads, bias=o.bias, **_without_none(conv=o.conv))


MIXERS: dict[str, Callable[[BlockOptions, int], nn.Module]] = {
    "softmax": _softmax,
    "latent": _latent,
    "differential": _differential,
    "linear": _linear,
    "gated": _gated,
    "delta": _delta,
    "windowed": _windowed,
}


def _make_custom(o: BlockOptions) -> nn.Module:
    assert callable(o.mixer)
    mixer = o.mixer(o.embed_dim, o.num_heads)
    if not isinstance(mixer, nn.Module) or getattr(mixer, "embed_dim", None) != o.embed_dim:
        expected = f"what makes a module with embed_dim {o.embed_dim} and forward(x, cache, mask), as TokenMixer says"
        raise BadInput("mixer", o.mixer_name, expected)
    return mixer


def _without_none(**options: Any) -> dict[str, Any]:
    """Return the options that are not None: others are left to the defaults of a mixer."""
    return {name: value for name, value in options.items() if value is not None}


def _position(o: BlockOptions, number: int, window: int | None) -> Position | None:
    if o.nope_every is not None and (number + 1) % o.nope_every == 0:
        return None
    if window is not None and o.local_rope_base is not None:
        return Rotary(o.local_rope_base, None, o.rope_fraction)
    return Alibi() if o.position == "alibi" else _rotary(o)


def _rotary(o: BlockOptions) -> Rotary | None:
    if o.position != "rotary":
        return None
    try:
        return Rotary(o.rope_base, o.rope_scaling, o.rope_fraction)
    except BadInput as fault:
        raise BadInput(f"rope_{fault.argument}", fault.value, fault.expected) from None
