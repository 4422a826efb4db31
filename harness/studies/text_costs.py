"""What a language model costs a token: operations of its training, bytes of its cache, time to write one."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from datamodules import InMemoryData
from harness.runs.records import NetRecord
from harness.studies import costs
from lit_modules.nets import any_kernel
from lit_modules.nets.base import evaluating

PREFILLED, WARM, TIMED = 512, 3, 32  # tokens that fill the cache at once, and that are written before and while timed


def add_costs(record: NetRecord, net: nn.Module, data: InMemoryData, timed_at: Sequence[int]) -> NetRecord:
    """Add to the record of a trained net what a token costs; decoding is timed with so many tokens in the cache."""
    if record.trained_epochs is None:
        return record
    length, figures = data.input_shape[0], dict(record.figures)
    figures["flops_token"] = training_flops(net, data)
    step_ms, rows = figures.get("step_ms"), min(data.batch_size, data.sizes["train"])
    figures["tokens_per_second"] = None if step_ms is None else 1e3 * rows * length / step_ms
    for tokens in timed_at or [length]:
        figures[f"cache_bytes_{tokens}"] = cache_bytes(net, tokens)
    for tokens in timed_at:
        figures[f"decode_ms_{tokens}_{torch.get_num_threads()}"] = decoding_ms(net, tokens)
    return replace(record, figures=figures)


def training_flops(net: nn.Module, data: InMemoryData) -> float | None:
    """Count the floating-point operations of forward and backward of one sample, divided by its tokens T.

    None where an operator has no formula, as in `costs.flops`.
    """
    weight = next(net.parameters())
    inputs, _ = data.samples("train", torch.zeros(1, dtype=torch.int64), weight.dtype)
    inputs = inputs.to(weight.device)

    def step() -> Tensor:
        logits: Tensor = net(inputs)
        return F.cross_entropy(logits.flatten(0, 1), inputs.flatten().long() % logits.shape[-1])

    with costs.alone(weight.device), evaluating(net), any_kernel(net), torch.enable_grad():
        operations = costs.flops(step)
    net.zero_grad()
    return None if operations is None else operations / inputs.numel()


def cache_bytes(net: nn.Module, tokens: int) -> float | None:
    """Return the bytes that a text's cache takes after so many tokens, divided by these; None if the net has none."""
    if not hasattr(net, "cache_bytes"):
        return None
    size = next(net.parameters()).element_size()
    return float(net.cache_bytes(tokens, size)) / tokens  # type: ignore[operator]


@torch.no_grad()
def decoding_ms(net: nn.Module, tokens: int) -> float | None:
    """Time a token of one text on the CPU, the median of 32, with so many tokens in the cache before it.

    The net is a new one with the same options, as its weights move no time, and with a block that holds the text. None
    where a net has no cache, or can't have such a block.
    """
    options: dict[str, Any] = dict(getattr(net, "init_args", {}))
    if not hasattr(net, "decoder") or "block_size" not in options:
        return None
    whole = tokens + WARM + TIMED
    options["block_size"] = max(whole, options["block_size"])
    longer: Any = with_seed(0, lambda: type(net)(**options)).to(next(net.parameters()).dtype)
    text = torch.arange(whole)[None] % options["vocab_size"]
    moments: list[float] = []
    with evaluating(longer), any_kernel(longer):
        decoder = longer.decoder(whole, None)
        for start in range(0, tokens, PREFILLED):
            decoder(text[:, start : min(start + PREFILLED, tokens)])
        for place in range(tokens, whole):
            begin = time.perf_counter()
            decoder(text[:, place : place + 1])
            moments.append(time.perf_counter() - begin)
    took = 1e3 * median(moments[WARM:])
    return took if math.isfinite(took) else None
