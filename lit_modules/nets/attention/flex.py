"""Torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496), with block masks that are made once and kept."""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from apprentice.errors import BadInput
from lit_modules.nets.attention.masks import CausalMask

KEPT = 32  # block masks: of one training and its evaluation there are a few
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, batch, head, query, key -> score


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | CausalMask | None, causal: bool, dropout: float,
    scale: float | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Return what `attend` does; on a CPU, but inside `torch.compile`, by an unfused form that holds all scores.

    Raises:
        BadInput: dropout of weights, nested tensors, or gradients on a CPU.
    """
    _check(dropout, query, key, value)
    slopes = bias = blocks = None
    if isinstance(mask, CausalMask):
        blocks, slopes = _blocks_of(query.shape[2], mask.window, mask.sinks, query.device), mask.slopes
    elif mask is not None:
        shape = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        bias = mask.expand(shape)
    elif causal:
        blocks = _blocks_of(query.shape[2], None, 0, query.device)
    rule = _rule(softcap, slopes, bias)
    return _call(query, key, value, rule, blocks, scale, query.shape[1] != key.shape[1])


def _check(dropout: float, *inputs: Tensor) -> None:
    if dropout:
        raise BadInput("backend", "flex", f"another kernel: flex has no dropout of weights, which is {dropout}")
    if any(x.is_nested for x in inputs):
        raise BadInput("backend", "flex", "another kernel: flex takes no nested tensors")
    if inputs[0].device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise BadInput("backend", "flex", "another kernel to train: on a CPU flex has no gradients")


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _call(*args: Any) -> Tensor:
    """Call torch's function, on a GPU compiled; on a CPU, whose compiler takes 10 s, only inside `torch.compile`."""
    if torch.compiler.is_compiling():
        mixed: Tensor = flex_attention(*args)
    elif args[0].device.type != "cpu":
        mixed = _compiled()(*args)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            mixed = flex_attention(*args)
    return mixed


def _blocks_of(length: int, window: int | None, sinks: int, device: torch.device) -> BlockMask:
    make: Any = _make_blocks if torch.compiler.is_compiling() else _kept_blocks
    blocks: BlockMask = make(length, window, sinks, device)
    return blocks


def _make_blocks(length: int, window: int | None, sinks: int, device: torch.device) -> BlockMask:
    """Return which blocks of a text's queries see which blocks of its keys."""

    def seen(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if window is None:
            return j <= i
        near = i - j < window
        return (j <= i) & (near | (j < sinks) if sinks else near)

    return create_block_mask(seen, None, None, length, length, device)


_kept_blocks = lru_cache(KEPT)(_make_blocks)


def _rule(softcap: float | None, slopes: Tensor | None, mask: Tensor | None) -> Rule | None:
    """Return how a score changes: capped, with the bias of a distance, and masked, (B, H, T, n) bool or to be added."""
    if softcap is None and slopes is None and mask is None:
        return None

    def change(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * (i - j)
        if mask is None:
            return score
        entry = mask[batch, head, i, j]
        return torch.where(entry, score, -torch.inf) if mask.dtype == torch.bool else score + entry

    return change
