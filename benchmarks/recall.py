"""Which mixers recall: right answers of small GPTs on associative recall, with and without the short convolution.

    python benchmarks/recall.py                              # some minutes of one thread
    python benchmarks/recall.py --only delta --steps 2       # seconds

Two layers of width 32, two heads, texts of 32 tokens out of 64 with 4 pairs, 64 a batch, each seen once, AdamW at 3e-3
and gradients clipped at 1: accuracy on 1,000 other texts. Chance among the values of a text is 0.25.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from benchmarks import common
from datamodules import Recall
from lit_modules.nets import GPT, DeltaAttention, GatedLinearAttention, LinearAttention, SelfAttention
from lit_modules.nets.attention.convolution import ShortConvolution
from lit_modules.nets.gpt import STD

WIDTH, HEADS, LAYERS, BATCH, TESTED = 32, 2, 2, 64, 1000


class ConvolvedSoftmax(nn.Module):
    """Softmax attention whose queries, keys and values come of the convolution, for this comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = WIDTH
        self.attention = SelfAttention(WIDTH, HEADS, causal=True)
        self.conv = ShortConvolution(3 * WIDTH)
        self.attention.qkv.register_forward_hook(lambda _module, _inputs, output: self.conv(output)[0])

    def forward(self, x: Tensor, cache: None = None, mask: None = None) -> Tensor:
        mixed: Tensor = self.attention(x, cache, mask)
        return mixed


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "softmax": partial(SelfAttention, WIDTH, HEADS, causal=True),
    "softmax, convolution": ConvolvedSoftmax,
    "linear": partial(LinearAttention, WIDTH, HEADS),
    "linear, convolution": partial(LinearAttention, WIDTH, HEADS, conv=4),
    "taylor, convolution": partial(LinearAttention, WIDTH, HEADS, "taylor", conv=4),
    "gated, convolution": partial(GatedLinearAttention, WIDTH, HEADS, conv=4),
    "delta": partial(DeltaAttention, WIDTH, HEADS, conv=0),
    "delta, convolution": partial(DeltaAttention, WIDTH, HEADS),
}


def make_net(data: Recall, make_mixer: Callable[[], nn.Module]) -> GPT:
    """Return a GPT with this mixer in each block, its matrices drawn as GPT's."""
    net = GPT(data.vocab_size, data.block_size, LAYERS, HEADS, WIDTH)
    for block in net.blocks:
        mixer: Any = make_mixer()
        for module in mixer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(getattr(mixer, "attention", mixer).out.weight, std=STD / math.sqrt(2 * LAYERS))
        block.attention = mixer
    return net


def train(name: str, steps: int, every: int, seed: int) -> dict[int, float]:
    """Return the share of right answers after each `every` steps."""
    data = Recall(train_size=steps * BATCH, test_size=TESTED, validation_size=0)
    texts, tested = data.split("train"), data.split("test")
    net = with_seed(seed, lambda: make_net(data, MIXERS[name]))
    optimizer, answers = torch.optim.AdamW(net.parameters(), 3e-3), dict[int, float]()
    for step in range(1, steps + 1):
        inputs, labels = texts.take(torch.arange(step * BATCH - BATCH, step * BATCH))
        optimizer.zero_grad()
        F.cross_entropy(net(inputs).flatten(0, 1), labels.flatten()).backward()  # it leaves out -100
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == steps:
            inputs, labels = tested.take(torch.arange(TESTED))
            with torch.no_grad():
                answers[step] = float((net(inputs).argmax(-1) == labels)[labels >= 0].double().mean())
    return answers


def main(argv: Sequence[str] | None = None) -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--only", nargs="+", choices=MIXERS, default=[*MIXERS])
    command.add_argument("--steps", type=int, default=750)
    command.add_argument("--every", type=int, default=250, help="steps between tests")
    command.add_argument("--seed", type=int, default=0, help="of the first weights")
    command.add_argument("--out", type=common.out_file(), help="write all figures to this file, as JSON")
    args = command.parse_args(argv)
    torch.set_num_threads(1)
    rows = {}
    for name in args.only:
        rows[name] = train(name, args.steps, args.every, args.seed)
        print(f"{name:22}", *(f"{step}: {share:.3f}" for step, share in rows[name].items()), flush=True)
    if args.out:
        common.write_figures(args.out, "recall", {"rows": rows})


if __name__ == "__main__":
    main()
