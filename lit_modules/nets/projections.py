"""Queries, keys and values of self-attention in language models and ViTs, for methods that compare them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from apprentice.contract import Joined
from apprentice.errors import BadInput
from lit_modules.nets.attention.positions import Alibi, Rotary
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.base import Net, evaluating
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.layers import INPUT, resolve, run
from lit_modules.nets.timm import Timm
from lit_modules.nets.vit import ViT

# Of our nets, GPT-2 and timm, with what reads the heads.
JOINED = {"attention.qkv": "attention.out", "attn.c_attn": "attn.c_proj", "attn.qkv": "attn.proj"}
APART, OUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"  # of Llama's kind
KINDS = "a block of GPT, of a HuggingFaceLM of Llama's kind or GPT-2, of ViT, or of timm's plain ViT"
TOLERANCE = 2e-2, 1e-4  # of 16 bits, and of more, as a share of the largest value: new nets have small ones


class Projections(NamedTuple):
    """The layers of a block that give queries, keys and values, and what its attention makes of them."""

    paths: tuple[str, ...]  # of one layer for all three, or of one for each
    heads: int  # of queries; several may share a key and a value
    scale: float | None = None  # of products; None for 1 / sqrt(width of a head)
    frequencies: tuple[float, ...] = ()  # of rotary positions, in radians a token
    magnitude: float = 1.0  # of what is rotated
    rows: tuple[int, ...] = ()  # of queries, keys and values in one layer for all three; () for as many of each
    causal: bool = True  # whether a token attends to itself and earlier ones alone

    def split(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, T, heads, width) of the layers' outputs, with positions, at 32 bits."""
        joined = outputs[0].split(self.rows, -1) if self.rows else outputs[0].chunk(3, -1)
        parts = joined if len(outputs) == 1 else outputs
        wide = [widen(x.flatten(2)) for x in parts]
        width = wide[0].shape[2] // self.heads
        query, key, value = (x.unflatten(2, (-1, width)) for x in wide)
        key, value = (x.repeat_interleave(self.heads // x.shape[2], 2) for x in (key, value))
        return self._rotate(query), self._rotate(key), value

    def _rotate(self, x: Tensor) -> Tensor:
        if not (half := len(self.frequencies)):
            return x
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)
        angles = places[:, None, None] * torch.tensor(self.frequencies, device=x.device, dtype=torch.float64)
        cos, sin = ((f(angles) * self.magnitude).to(x.dtype) for f in (torch.cos, torch.sin))
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def scale_of(self, width: int) -> float:
        return 1 / math.sqrt(width) if self.scale is None else self.scale


def products(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return (b, T, heads, T), the scaled products of (b, T, heads, width) with those of every place."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.einsum("bihd,bjhd->bihj", left, right) * scale


def hide_later(scores: Tensor) -> Tensor:
    """Set scores (b, T, heads, T) of later places, to which no token attends, to a number whose exponential is 0."""
    places = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(places > places[:, None, None], torch.finfo(scores.dtype).min / 4)


def block_names(net: nn.Module) -> tuple[str, ...]:
    """Return the names of a net's blocks: its stages, but of ViT, whose stages show inputs of all blocks but one."""
    if isinstance(net, ViT):
        return tuple(f"blocks.{number}" for number in range(len(net.blocks)))
    return tuple(getattr(net, "stages", ()))


def find_projections(net: nn.Module, name: str, option: str) -> Projections:
    """Return a block's projections; they are tried, so attention that differs in any way from this one is refused.

    Raises:
        BadInput: for `option`, the layer of this name is no block whose attention is known.
    """
    path = resolve(net, name)
    path = path.removesuffix(".maps") if isinstance(net, ViT) else path
    parts = {key.removeprefix(f"{path}."): module for key, module in net.named_modules() if key.startswith(f"{path}.")}
    joined = next((key for key in JOINED if key in parts), None)
    if not isinstance(net, GPT | ViT | HuggingFaceLM | Timm) or not (joined or {*APART, OUT} <= {*parts}):
        raise BadInput(option, name, KINDS)
    out = OUT if joined is None else JOINED[joined]
    attention = next((module for module in parts.values() if isinstance(module, SelfAttention)), None)
    if attention is not None or isinstance(net, GPT | ViT):
        projections = _of_ours(attention, path, (option, name))
    elif isinstance(net, Timm):
        heads: Any = getattr(parts["attn"], "num_heads", 1)
        projections = Projections((f"{path}.{joined}",), heads, causal=False)
    elif joined:
        heads = int(net.model.config.num_attention_heads)
        projections = Projections((f"{path}.{joined}",), heads)
    else:
        projections = _of_llama(net, path, {*parts})
    if not _is_right(net, projections, f"{path}.{out}{INPUT}"):
        raise BadInput(option, name, f"{KINDS}; attention of this one is of another form")
    return projections


def _of_llama(net: HuggingFaceLM, path: str, parts: set[str]) -> Projections:
    normed = [key.replace("proj", "norm") for key in APART]
    paths = [norm if norm in parts else key for norm, key in zip(normed, APART, strict=True)]
    heads = int(net.model.config.num_attention_heads)
    projections = Projections(tuple(f"{path}.{key}" for key in paths), heads)
    if isinstance(scaling := getattr(net.get_submodule(f"{path}.self_attn"), "scaling", None), float):
        projections = projections._replace(scale=scaling)
    rotary: Any = next((m for m in net.modules() if hasattr(m, "inv_freq")), None)
    if rotary is None:
        return projections
    frequencies = tuple(rotary.inv_freq.double().tolist())
    return projections._replace(frequencies=frequencies, magnitude=float(getattr(rotary, "attention_scaling", 1.0)))


def _of_ours(attention: SelfAttention | None, path: str, block: tuple[str, str]) -> Projections:
    """Return the projections of our layer; a short text would not show that a form hides or bends some scores."""
    if attention is None:
        raise BadInput(*block, f"{KINDS}, with softmax attention")
    forms = {
        "window": attention.window, "softcap": attention.form.softcap, "qk_norm": attention.q_norm,
        "gate": attention.gate, "alibi": attention.position if isinstance(attention.position, Alibi) else None,
    }  # fmt: skip
    if others := [name for name, value in forms.items() if value is not None]:
        raise BadInput(*block, f"{KINDS}, without {', '.join(others)}")
    rows, heads = cast("Joined", attention.qkv).joined[0], attention.num_heads
    scale, causal = attention.form.scale, attention.causal
    projections = Projections((f"{path}.attention.qkv",), heads, scale, rows=rows, causal=causal)
    if not isinstance(rotary := attention.position, Rotary):
        return projections
    frequencies = tuple(rotary.frequencies(attention.head_dim).tolist())
    return projections._replace(frequencies=frequencies, magnitude=rotary.magnitude)


def _is_right(net: Net, projections: Projections, read: str) -> bool:
    """Return whether attention by these projections is what the net's layer `read` gets."""
    first = next(net.parameters())
    if projections.causal:
        example = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], device=first.device)
    else:
        example = torch.rand(2, *net.init_args["input_shape"], generator=torch.Generator().manual_seed(0)).to(
            first.device
        )
    with evaluating(net):
        features = run(net, example, {*projections.paths, read}).features
        try:
            query, key, value = projections.split([features[path] for path in projections.paths])
            scores = products(query, key, projections.scale_of(query.shape[3]))
            weights = (hide_later(scores) if projections.causal else scores).softmax(-1)
        except (RuntimeError, ZeroDivisionError):  # shapes of something else
            return False
        ours, theirs = torch.einsum("bihj,bjhd->bihd", weights, value).flatten(2), features[read]
    if ours.shape != theirs.shape:
        return False
    tolerance = TOLERANCE[theirs.element_size() > 2]
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
