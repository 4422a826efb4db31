"""What a language model costs a token: operations of its training, bytes of its cache, time to write one."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules.base import InMemoryData
from harness.runs.records import NetRecord
from harness.studies import costs
from harness.studies.operations import flops
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.base import evaluating
from lit_modules.nets.generation import check_writer
from lit_modules.nets.specs import rebuild

PREFILLED, WARM, TIMED = 512, 3, 32  # tokens that fill the cache at once, and that are written before and while timed
TRIED = 4  # tokens of texts that a decoder is tried with


def add_costs(record: NetRecord, net: nn.Module, data: InMemoryData, timed_at: Sequence[int]) -> NetRecord:
    """Add to the record of a trained net what a token costs; decoding is timed with so many tokens in the cache."""
    if record.trained_epochs is None:
        return record
    figures, longest = dict(record.figures), data.net_arguments.get("block_size", data.input_shape[0])
    figures["flops_token"] = training_flops(net, data)
    step_ms = figures.get("step_ms")
    figures["tokens_per_second"] = None if step_ms is None else 1e3 * data.typical_batch().labels / step_ms
    for tokens in timed_at or [longest]:
        figures[f"cache_bytes_{tokens}"] = cache_bytes(net, tokens)
    for tokens in timed_at:
        figures[f"decode_ms_{tokens}_{torch.get_num_threads()}"] = decoding_ms(net, tokens)
    return replace(record, figures=figures)


def training_flops(net: nn.Module, data: InMemoryData) -> float | None:
    """Count the floating-point operations of forward and backward of a row of a typical batch, divided by its tokens.

    None where an operator has no formula, as in `flops`.
    """
    weight = next(net.parameters())
    inputs = data.typical_batch(weight.dtype).batch.inputs[:1].to(weight.device)

    def step() -> Tensor:
        logits: Tensor = net(inputs)
        return F.cross_entropy(logits.flatten(0, 1), inputs.flatten().long() % logits.shape[-1])

    with costs.alone(weight.device), evaluating(net), any_kernel(net), torch.enable_grad():
        operations = flops(step)
    net.zero_grad()
    return None if operations is None else operations / inputs.numel()


def cache_bytes(net: nn.Module, tokens: int) -> float | None:
    """Return the bytes that a text's cache takes after so many tokens, divided by these; None if the net has none."""
    count: Callable[[int, int], int | None] | None = getattr(net, "cache_bytes", None)
    if count is None:
        return None
    bytes_kept = count(tokens, next(net.parameters()).element_size())
    return None if bytes_kept is None else float(bytes_kept) / tokens


def check_decoding(net: nn.Module, flag: str, is_timed: bool = False) -> None:
    """Raise BadInput if a net has a decoder that fails, or gives other logits than one pass over the text.

    Or has none, as a mixer has no cache, where decoding is timed.
    """
    make: Callable[[int, None], object] | None = getattr(net, "decoder", None)
    if make is None:
        return
    with any_kernel(net):
        if (getattr(net, "block_size", None) or TRIED) >= TRIED:
            check_writer(net, flag, padded=False)
        if is_timed and make(TRIED, None) is None:
            expected = (
                "a net whose mixers all have new_cache(), or without `decode_at`: that times decoding from a cache"
            )
            raise BadInput(flag, type(net).__name__, expected)


@torch.no_grad()
def decoding_ms(net: nn.Module, tokens: int) -> float | None:
    """Time a token of one text on the CPU, the median of 32, with so many tokens in the cache before it.

    The net is a new one with the same options, as its weights move no time, and with a block that holds the text. None
    where a net has no cache, or can't have such a block.
    """
    options: dict[str, Any] = rebuild(dict(getattr(net, "init_args", {})))
    if not hasattr(net, "decoder") or "block_size" not in options:
        return None
    whole = tokens + WARM + TIMED
    options["block_size"] = max(whole, options["block_size"])
    longer: Any = with_seed(0, lambda: type(net)(**options)).to(next(net.parameters()).dtype)
    text = torch.arange(whole)[None] % options["vocab_size"]
    moments: list[float] = []
    with evaluating(longer), any_kernel(longer):
        decoder = longer.decoder(whole, None)
        if decoder is None:
            return None
        for start in range(0, tokens, PREFILLED):
            decoder(text[:, start : min(start + PREFILLED, tokens)])
        for place in range(tokens, whole):
            begin = time.perf_counter()
            decoder(text[:, place : place + 1])
            moments.append(time.perf_counter() - begin)
    took = 1e3 * median(moments[WARM:])
    return took if math.isfinite(took) else None
