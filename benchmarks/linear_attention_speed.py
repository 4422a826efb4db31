"""Linear attention in chunks over its parallel form and over torch's softmax attention, of the same shapes.

    python benchmarks/linear_attention_speed.py                          # two minutes of one thread
    python benchmarks/linear_attention_speed.py --lengths 256 --repeat 1  # seconds, whose figures say nothing

One text of 2,048 and of 8,192 tokens, two heads of 64, float32, without gradients. Rivals take turns.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks import common
from benchmarks.common import Measurement, Target
from lit_modules.nets.attention import delta, gated, linear

HEADS, WIDTH, LENGTHS = 2, 64, (2048, 8192)


def make_rivals(length: int) -> dict[str, Callable[[], object]]:
    """Return the calls by name, of noise from a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, HEADS, length, WIDTH, generator=draw) for _ in range(4))
    units, gates = (F.normalize(q, dim=-1), F.normalize(k, dim=-1)), F.logsigmoid(g)
    rule = (*units, v, gates[..., 0].exp(), gates[..., 1])
    return {
        "softmax, flash": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "linear, parallel": partial(linear.parallel, F.elu(q) + 1, F.elu(k) + 1, v),
        "linear, chunks": partial(linear.chunked, F.elu(q) + 1, F.elu(k) + 1, v),
        "gated, chunks": partial(gated.chunked, q, k, v, gates / 16),
        "delta, parallel": partial(delta.parallel, *rule),
        "delta, chunks": partial(delta.chunked, *rule),
    }


def targets(lengths: Sequence[int]) -> dict[str, Target]:
    words: dict[str, Target] = {}
    for length in lengths:
        is_long = length >= max(LENGTHS)
        for kind in ("linear", "delta"):
            high = 1 / 20 if is_long and kind == "linear" else float("inf")
            words[f"{kind} {length}"] = Target(f"{kind} attention, {length:,} tokens, chunks over parallel", high=high)
        for kind in ("linear", "gated", "delta"):
            high = 1 / 5 if is_long and kind == "linear" else float("inf")
            text = f"{kind} attention in chunks, {length:,} tokens, over flash softmax"
            words[f"{kind} {length}, softmax"] = Target(text, high=high)
    return words


@torch.no_grad()
def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    figures, ratios = dict[str, list[float]](), dict[str, list[float]]()
    for length in args.lengths:
        rivals = make_rivals(length)
        timed = {name: partial(common.seconds, call) for name, call in rivals.items()}
        common.take_turns(timed, 1)  # the first calls are slower
        runs = common.take_turns(timed, args.rounds)
        figures |= {f"{name}, {length:,} tokens": [1000 * x for x in values] for name, values in runs.items()}
        for kind in ("linear", "delta"):
            ratios[f"{kind} {length}"] = common.over(runs[f"{kind}, chunks"], runs[f"{kind}, parallel"])
        for kind in ("linear", "gated", "delta"):
            ratios[f"{kind} {length}, softmax"] = common.over(runs[f"{kind}, chunks"], runs["softmax, flash"])
    return Measurement({"ms": figures}, ratios)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 5), "rounds in which all take turns")
    command.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the text")
    args = command.parse_args(argv)
    common.run(args, measure, targets(args.lengths))


if __name__ == "__main__":
    main()
