"""Attention layers over others that give the same numbers: training, decoding, linear forms, grouped queries.

    python benchmarks/attention_speed.py                            # 4 minutes of one thread
    python benchmarks/attention_speed.py --only linear --repeat 5
    python benchmarks/attention_speed.py --quick                    # seconds, whose figures say nothing

float32, one thread. Rivals have the same weights and input, and are first checked to give the same numbers. Training is
forward and backward of two texts of 256 tokens, 256 wide with heads of 64; families of transformers are nets of two
blocks. Decoding is the next token of one text after 4,096: the rival is the faster of transformers' caches, dynamic and
static; `plain` writes into buffers and calls torch's kernel. Linear forms are of one text of 8,192 tokens with two
heads of 64, without gradients, beside `naive.py` of flash-linear-attention. Needs transformers and fla-core.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import common
from benchmarks.attention_rivals import (
    Call,
    Pair,
    Plain,
    Sizes,
    differential,
    family,
    latent,
    naive,
    noise,
    plain,
    rotations,
    torch_attention,
    torch_block,
)
from benchmarks.common import Measurement, Target
from lit_modules.nets import GPT
from lit_modules.nets.attention import delta, gated, linear
from lit_modules.nets.attention.attend import attend
from lit_modules.nets.attention.form import Form

PARTS = ("training", "decoding", "linear", "grouped")
QUICK = Sizes(width=32, heads=4, texts=1, length=8, window=4, cached=12, long=64)
TRAINING: dict[str, Callable[[Sizes], Pair]] = {
    "attention": torch_attention,
    "block": torch_block,
    "plain": plain,
    "llama": lambda sizes: family("Llama", sizes),
    "mistral": lambda sizes: family("Mistral", sizes, sliding_window=sizes.window),
    "qwen3": lambda sizes: family("Qwen3", sizes),
    "latent": latent,
    "differential": differential,
}
DECODING = ("plain", "llama", "mistral", "qwen3", "latent")


def targets() -> dict[str, Target]:
    words = {f"training {name}": Target(f"training step, {name}, over the rival's", high=1.05) for name in TRAINING}
    words |= {f"decoding {name}": Target(f"a token after 4k, {name}, over the rival's", high=1.1) for name in DECODING}
    words["linear parallel"] = Target("linear attention, chunks over parallel", high=1 / 20)
    for kind in ("linear", "gated", "delta"):
        high = 1 / 5 if kind == "linear" else float("inf")
        words[f"{kind} softmax"] = Target(f"{kind} attention in chunks over flash softmax", high=high)
        words[f"{kind} naive"] = Target(f"{kind} attention in chunks over fla's naive.py", high=1.05)
    return words | {"grouped": Target("decoding, 32 heads over 8, queries as rows over enable_gqa", high=1.0)}


def same(name: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """Stop if two results differ by more than rounding."""
    difference = float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
    if not difference <= tolerance:
        raise SystemExit(f"{name}: the rival gives other numbers, by {difference:.1e} of the largest")


# Training


def step(pair: Pair, is_ours: bool) -> tuple[Tensor, Tensor]:
    """Go forward and backward; return the output and the norm of all gradients."""
    module, call = (pair.ours, pair.call_ours) if is_ours else (pair.theirs, pair.call_theirs)
    output = call()
    output.square().mean().backward()
    norm = torch.stack([p.grad.square().sum() for p in module.parameters() if p.grad is not None]).sum().sqrt()
    module.zero_grad()
    return output, norm


def training(args: argparse.Namespace, sizes: Sizes) -> Measurement:
    figures, ratios = dict[str, list[float]](), dict[str, list[float]]()
    for name, make in TRAINING.items():
        pair = make(sizes)
        for mine, other in zip(step(pair, True), step(pair, False), strict=True):
            same(name, mine, other)
        sides = {f"{name}, ours": True, f"{name}, {pair.rival}": False}
        runs = time_calls({side: partial(step, pair, is_ours) for side, is_ours in sides.items()}, args.rounds)
        figures |= runs
        ratios[f"training {name}"] = common.over(*runs.values())
    return Measurement({"ms a training step": figures}, ratios)


def time_calls(calls: Mapping[str, Callable[[], object]], rounds: int, inner: int = 1) -> dict[str, list[float]]:
    """Return milliseconds of a call, of so many in each round, after one that is not timed."""

    def run(call: Callable[[], object]) -> float:
        return 1e3 / inner * common.seconds(lambda: [call() for _ in range(inner)])

    for call in calls.values():
        call()
    return common.take_turns({name: partial(run, call) for name, call in calls.items()}, rounds)


# Decoding

INNER = 8  # tokens in a round


def decode_ours(net: GPT, sizes: Sizes, room: int) -> Call:
    """Fill the cache; return what writes one more token."""
    decoder = net.decoder(sizes.cached + room, None)
    assert decoder is not None  # its mixers have caches
    tokens = torch.arange(sizes.cached)[None] * 7 % 256
    for part in tokens.split(512, 1):
        decoder(part)
    return lambda: decoder(torch.ones(1, 1, dtype=torch.int64))


def decode_theirs(model: Any, sizes: Sizes, room: int, is_static: bool) -> Call:
    from transformers import DynamicCache, StaticCache

    config = model.config
    cache: Any = StaticCache(config, max_cache_len=sizes.cached + room) if is_static else DynamicCache(config=config)
    model.eval()

    def call(tokens: Tensor) -> Tensor:
        output: Tensor = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return output

    tokens = torch.arange(sizes.cached)[None] * 7 % 256
    for part in tokens.split(512, 1):
        call(part)
    return lambda: call(torch.ones(1, 1, dtype=torch.int64))


def decode_latent(sizes: Sizes, room: int) -> dict[str, Call]:
    """A token of DeepSeek's layer, whose cache in transformers holds keys and values of all heads."""
    from transformers import DynamicCache

    pair, x = latent(sizes), noise(1, sizes.cached + room, sizes.width)
    ours: Any = pair.ours
    theirs: Any = pair.theirs
    cache, other = ours.new_cache(sizes.cached + room), DynamicCache()
    width = sizes.width // sizes.heads // 2
    places = {"ours": 0, pair.rival: 0}

    def mine(count: int) -> Tensor:
        places["ours"] += count
        output: Tensor = ours(x[:, places["ours"] - count : places["ours"]], cache)
        return output

    def rival(count: int) -> Tensor:
        start = places[pair.rival]
        places[pair.rival] = end = start + count
        mask = None
        if count > 1:
            mask = torch.zeros(count, end).masked_fill(torch.ones(count, end).triu(start + 1) > 0, float("-inf"))
        output: Tensor = theirs(x[:, start:end], rotations(start, end, width), mask, past_key_values=other)[0]
        return output

    for call in (mine, rival):
        for part in range(0, sizes.cached, 512):
            call(min(512, sizes.cached - part))
    return {"ours": partial(mine, 1), pair.rival: partial(rival, 1)}


def decode_plain(sizes: Sizes, room: int) -> dict[str, Call]:
    """A token of one layer, whose keys and values a loop as one writes it stores in buffers."""
    pair, x = plain(sizes), noise(1, sizes.cached + room, sizes.width)
    ours: Any = pair.ours
    theirs: Plain = pair.theirs  # type: ignore[assignment]
    cache, shape = (
        ours.new_cache(sizes.cached + room),
        (1, sizes.heads, sizes.cached + room, sizes.width // sizes.heads),
    )
    keys, values = torch.empty(shape), torch.empty(shape)
    ours(x[:, : sizes.cached], cache)
    _, keys[:, :, : sizes.cached], values[:, :, : sizes.cached] = theirs.split(x[:, : sizes.cached])
    place = {"ours": sizes.cached, pair.rival: sizes.cached}

    def token(side: str) -> Tensor:
        at = place[side]
        place[side] += 1
        now = x[:, at : at + 1]
        output: Tensor = ours(now, cache) if side == "ours" else theirs.write(now, keys, values, at)
        return output

    return {side: partial(token, side) for side in place}


def decoding(args: argparse.Namespace, sizes: Sizes) -> Measurement:
    figures, ratios, room = dict[str, list[float]](), dict[str, list[float]](), INNER * args.rounds + 8
    for name in DECODING:
        if name in {"plain", "latent"}:
            calls = (decode_plain if name == "plain" else decode_latent)(sizes, room)
        else:
            pair = TRAINING[name](sizes)
            net: Any = pair.ours
            longer = GPT(**{**net.init_args, "block_size": sizes.cached + room})
            longer.load_state_dict(net.state_dict())
            calls = {"ours": decode_ours(longer.eval(), sizes, room)}
            for kind in ("dynamic", "static"):
                calls[f"{pair.rival}, {kind}"] = decode_theirs(pair.theirs, sizes, room, kind == "static")
        first, *others = (call() for call in calls.values())
        for other in others:
            same(f"{name}, decoding", first, other)
        runs = time_calls(calls, args.rounds, INNER)
        figures |= {f"{name}, {side}": values for side, values in runs.items()}
        mine, *rivals = runs.values()
        ratios[f"decoding {name}"] = common.over(mine, min(rivals, key=sum))
    return Measurement({f"ms a token after {sizes.cached:,}": figures}, ratios)


# Linear forms, grouped queries


def linear_forms(length: int) -> dict[str, Callable[[], Tensor]]:
    """Return the calls by name, on noise from a fixed seed."""
    q, k, v, g = (noise(4, 1, 2, length, 64)).unbind()
    units, gates = (F.normalize(q, dim=-1), F.normalize(k, dim=-1)), F.logsigmoid(g)
    features = F.elu(q) + 1, F.elu(k) + 1
    beta, decay = gates[..., 0].exp(), gates[..., 1]

    def turned(*tensors: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2).contiguous() for x in tensors]

    theirs = {
        "linear": partial(naive("linear_attn").naive_chunk_linear_attn, *turned(*features, v), normalize=True),
        "gated": partial(naive("gla").naive_recurrent_gla, *turned(q, k, v, gates / 16)),
        "delta": partial(naive("gated_delta_rule").naive_chunk_gated_delta_rule, *turned(*units, v, decay, beta)),
    }
    ours = {
        "linear": partial(linear.chunked, *features, v),
        "gated": partial(gated.chunked, q, k, v, gates / 16),
        "delta": partial(delta.chunked, *units, v, beta, decay),
    }
    calls: dict[str, Callable[[], Tensor]] = {
        "softmax, flash": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "linear, parallel": lambda: linear.parallel(*features, v)[0],
    }
    for kind, call in ours.items():
        calls[f"{kind}, chunks"] = partial(_first, call)
        calls[f"{kind}, naive.py"] = partial(_turned, theirs[kind])
    return calls


def _first(call: Callable[[], Any]) -> Tensor:
    """Return the outputs, without a state."""
    result = call()
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _turned(call: Callable[[], Any]) -> Tensor:
    return _first(call).transpose(1, 2)


def linears(args: argparse.Namespace, sizes: Sizes) -> Measurement:
    calls = linear_forms(sizes.long)
    for kind in ("linear", "gated", "delta"):
        same(kind, calls[f"{kind}, chunks"](), calls[f"{kind}, naive.py"]())
    same("linear, parallel", calls["linear, chunks"](), calls["linear, parallel"]())
    runs = time_calls(calls, args.rounds)
    ratios = {"linear parallel": common.over(runs["linear, chunks"], runs["linear, parallel"])}
    for kind in ("linear", "gated", "delta"):
        ratios[f"{kind} softmax"] = common.over(runs[f"{kind}, chunks"], runs["softmax, flash"])
        ratios[f"{kind} naive"] = common.over(runs[f"{kind}, chunks"], runs[f"{kind}, naive.py"])
    return Measurement({f"ms, {sizes.long:,} tokens": runs}, ratios)


def grouped(args: argparse.Namespace, sizes: Sizes) -> Measurement:
    q, k, v = noise(1, 32, 1, 64), noise(1, 8, sizes.cached, 64), noise(1, 8, sizes.cached, 64)
    calls = {
        "queries as rows": partial(attend, q, k, v, Form()),
        "enable_gqa": partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True),
    }
    same("grouped", calls["queries as rows"](), calls["enable_gqa"]())
    runs = time_calls(calls, args.rounds, INNER)
    return Measurement({f"ms, one query, {sizes.cached:,} keys": runs}, {"grouped": common.over(*runs.values())})


MEASURES = dict(zip(PARTS, (training, decoding, linears, grouped), strict=True))


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    parts = []
    for name in args.only or PARTS:
        with torch.set_grad_enabled(name == "training"):
            parts.append(MEASURES[name](args, QUICK if args.quick else Sizes()))
    return common.merge(parts)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 7), "rounds in which all take turns")
    command.add_argument("--only", nargs="+", choices=PARTS, help="parts; default: all")
    command.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    common.run(command.parse_args(argv), measure, targets())


if __name__ == "__main__":
    main()
