"""What tests of attention share: noise, comparisons with gradients, and softmax attention token by token."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets import SelfAttention
from lit_modules.nets.attention.positions import Alibi, Rotary
from lit_modules.nets.attention.rms_norm import RMSNorm


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of some function of what came out, by x and the parameters."""
    return list(torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum(), [x, *net.parameters()]))


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def jagged(texts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(texts, layout=torch.jagged)


def turn(x: Tensor, place: int, rotary: Rotary) -> Tensor:
    """(d,) of a head, rotated pair by pair."""
    half, scaling = len(x) // 2, rotary.scaling or {}
    kind, factor, length = scaling.get("rope_type"), scaling.get("factor"), 64
    first, second = [], []
    for m in range(half):
        theta = rotary.base ** (-2 * m / len(x))
        magnitude = 1.0
        if kind == "linear":
            theta /= factor
        if kind == "yarn":
            low, high = (len(x) * math.log(length / (n * 2 * math.pi)) / (2 * math.log(rotary.base)) for n in (32, 1))
            low, high = max(math.floor(low), 0), min(math.ceil(high), len(x) - 1)
            share = min(max((m - low) / (high - low), 0), 1)
            theta = theta * (1 - share) + theta / factor * share
            magnitude = 0.1 * math.log(factor) + 1
        if kind == "llama3":
            wave = 2 * math.pi / theta
            t = (length / wave - 1) / (4 - 1)
            theta = (
                theta
                if wave < length / 4
                else theta / factor
                if wave > length
                else (1 - t) * theta / factor + t * theta
            )
        cos, sin = math.cos(place * theta) * magnitude, math.sin(place * theta) * magnitude
        first.append(x[m] * cos - x[m + half] * sin)
        second.append(x[m + half] * cos + x[m] * sin)
    return torch.stack([*first, *second])


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _normed(heads: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, count: int) -> Tensor:
    """Queries and keys (T, H + K, d), each head normed, or all at once if the norms are as wide."""
    rows = []
    for text in heads:
        for norm, part in ((q_norm, text[:count]), (k_norm, text[count : count + (len(text) - count) // 2])):
            weight = norm.weight + norm.unit_offset
            rows.append(rms(part.reshape(-1, len(weight)), weight, norm.eps).view_as(part))
    return torch.cat(rows).view(len(heads), -1, heads.shape[2])


def formula(net: SelfAttention, text: Tensor, options: dict[str, Any], mask: Tensor | None = None) -> Tensor:
    """(T, D) of a text (T, D), token by token; a mask (H, T, T) is added to scores."""
    count = net.num_heads
    groups, d = count // options.get("num_kv_heads", count), options.get("head_dim", text.shape[1] // count)
    projected = text @ net.qkv.weight.T + (0 if net.qkv.bias is None else net.qkv.bias)
    heads = projected.unflatten(1, (-1, d))  # (T, H + 2 K, d)
    normed = None if net.q_norm is None or net.k_norm is None else _normed(heads, net.q_norm, net.k_norm, count)
    kv_heads, position, cap = count // groups, options.get("position"), options.get("softcap")
    window, sinks = options.get("window", len(text)), options.get("sinks", 0)
    rows = []
    for i in range(len(text)):
        outputs = []
        for h in range(count):
            scores, values = [], []
            for j in range(len(text)):
                if options.get("causal", True) and (j > i or (i - j >= window and j >= sinks)):
                    continue
                q, k = heads[i, h], heads[j, count + h // groups]
                if normed is not None:
                    q, k = normed[i, h], normed[j, count + h // groups]
                if isinstance(position, Rotary):
                    q, k = turn(q, i, position), turn(k, j, position)
                score = options.get("scale", 1 / math.sqrt(d)) * (q * k).sum()
                score = score if cap is None else cap * torch.tanh(score / cap)
                if isinstance(position, Alibi):  # 6 heads: 4 of a power of two, and 2 of twice that
                    score = score - [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3][h] * abs(i - j)
                scores.append(score if mask is None else score + mask[h, i, j])
                values.append(heads[j, count + kv_heads + h // groups])
            weights = torch.stack(scores).exp()
            total = weights.sum() if weights.sum() > 0 else 1.0
            outputs.append(sum(w / total * v for w, v in zip(weights, values, strict=True)))
        mixed = torch.cat(outputs)
        if net.gate is not None:
            gate = text[i] @ net.gate.weight.T + (0 if net.gate.bias is None else net.gate.bias)
            mixed = mixed / (1 + torch.exp(-gate))
        rows.append(mixed)
    return torch.stack(rows) @ net.out.weight.T + (0 if net.out.bias is None else net.out.bias)


def parts(model: Any, inputs: Tensor, heads: int | None = None) -> list[list[Tensor]]:
    """Of each block queries, keys and values (b, heads, T, width), from its weights."""
    x, blocks = model.embedding(inputs), []
    for block in model.blocks:
        y = F.layer_norm(x, x.shape[-1:], block.norm1.weight, block.norm1.bias, block.norm1.eps)
        joined = y @ block.attention.qkv.weight.mT + block.attention.qkv.bias
        shape = heads or block.attention.num_heads, -1
        blocks.append([z.unflatten(2, shape).transpose(1, 2) for z in joined.chunk(3, -1)])
        x = block(x)
    return blocks
