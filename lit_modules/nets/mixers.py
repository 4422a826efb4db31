"""What mixes tokens in a block: attention by the names of its options, or a user's own mixer."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput, reason
from apprentice.keyed import with_seed
from lit_modules.nets.attention.delta import DeltaAttention
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.gated import GatedLinearAttention
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.linear import LinearAttention
from lit_modules.nets.attention.positions import Alibi, Position, Rotary
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.attention.windowed import WindowedLinearAttention
from lit_modules.nets.block_options import BlockOptions
from lit_modules.nets.layers import PLACES

TRIED = 8  # tokens by which a user's mixer is checked
NOISE = 1 << 16  # number of the first block's dropout of attention weights, beyond those of all other dropout layers
WINDOW = 64  # of the mixer windowed, if none is given


class TokenMixer(Protocol):
    """What mixes tokens in a block: a module with this forward; docs/own-mixer.md has one.

    A class, or a function, that makes it is called with those of the arguments `embed_dim`, `num_heads` and `layer`
    that it has; `layer` is a number for its `apprentice.keyed.Dropout`. With an attribute `has_state` that is true,
    what it keeps of a text does not grow: a net of such mixers, without learned positions, writes beyond `block_size`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D) for any T; of no token what later ones say.

        For packed texts it takes a `mask` too, see `SelfAttention.forward` and `find_starts`, which reads it.
        """


@runtime_checkable
class CachedMixer(Protocol):
    """A mixer that keeps what it needs of earlier tokens when a text is continued.

    Without it a net writes by computing all tokens again for each new one.
    """

    def forward(self, x: Tensor, cache: Any | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which follow those that the cache has seen, if one is passed."""

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> Any:
        """Return an empty cache for texts of up to so many tokens, of which the first `padding` (B,) are none.

        A `MixerCache`, or an object of any kind; one that has no `reorder` and `crop` serves no beams and no drafts.
        """


@runtime_checkable
class MeasuredMixer(Protocol):
    """A mixer whose cache has a known size, for the table's columns of decoding."""

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes of a cache with so many tokens of a text, its elements of this size."""


def make_mixer(options: BlockOptions, number: int) -> nn.Module:
    """Return the mixer of the block `number`, from 0; BadInput if a user's class makes none."""
    if options.has_softmax(number):
        return _softmax(options, number)
    return MIXERS[options.mixer](options, number) if isinstance(options.mixer, str) else _make_custom(options, number)


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


def _make_custom(o: BlockOptions, number: int) -> nn.Module:
    sizes, make = {"embed_dim": o.embed_dim, "num_heads": o.num_heads, "layer": NOISE + number}, o.mixer
    assert callable(make)
    bound = make.keywords if isinstance(make, functools.partial) else {}
    try:
        names = sizes.keys() & inspect.signature(make).parameters.keys() - bound.keys()
        mixer: Any = make(**{name: sizes[name] for name in names})
    except Exception as error:  # noqa: BLE001 - whatever a user's class does
        expected = "a class or function of embed_dim, num_heads and layer, or some of these, that makes a mixer"
        raise BadInput("mixer", o.mixer_name, f"{expected}; it says: {reason(error)}") from None
    if not isinstance(mixer, nn.Module):
        raise BadInput("mixer", o.mixer_name, f"what makes an nn.Module; it gives {type(mixer).__name__}")
    return mixer


@torch.no_grad()
def check_mixer(mixer: nn.Module, embed_dim: int) -> None:
    """Raise BadInput unless a user's mixer with new weights is a causal `TokenMixer` of this width.

    Tokens are tried with a copy of it whose weights are not zero. Modules on the meta device are not tried.
    """
    name = type(mixer).__name__
    weight = next(mixer.parameters(), torch.empty(0))
    if weight.is_meta:
        return

    def outputs() -> list[Any]:
        trial = copy.deepcopy(mixer).eval()
        for parameter in trial.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.is_floating_point() else 0)
        x = torch.randn(2, TRIED, embed_dim, dtype=weight.dtype, device=weight.device)
        later = x.clone()
        later[:, -1] += 1  # the last alone, at which chunks of few tokens don't begin
        return [trial(x), trial(later)]

    try:
        before, after = with_seed(0, outputs)
    except Exception as error:  # noqa: BLE001 - whatever a user's mixer does
        expected = f"a module whose forward takes tokens (B, T, {embed_dim}) alone; it says: {reason(error)}"
        raise BadInput("mixer", name, expected) from None
    if not isinstance(before, Tensor) or before.shape != (2, TRIED, embed_dim):
        output = tuple(before.shape) if isinstance(before, Tensor) else type(before).__name__
        raise BadInput("mixer", name, f"outputs {(2, TRIED, embed_dim)} of as many tokens; it gives {output}")
    if not before.isfinite().all():
        raise BadInput("mixer", name, "finite outputs")
    change = (after - before)[:, :-1].abs().max()
    if not change <= PLACES * before.abs().max():
        raise BadInput(
            "mixer", name, "one that sees earlier tokens alone: what it gives for a token depends on later ones"
        )


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
