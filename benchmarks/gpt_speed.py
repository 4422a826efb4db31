"""One training step of experiments/gpt.py beside a plain loop, fetching a batch, and generation with and without cache.

    python benchmarks/gpt_speed.py                      # about ten minutes on 2 cores
    python benchmarks/gpt_speed.py --out FILE --steps 300 --repeat 3 --threads 2

All train nanoGPT's small CPU recipe: 4 layers, 4 heads, 128 wide, blocks of 64, batches of 12, no dropout, AdamW,
float32. `loop` is a plain loop with a plain net, both written out below, that gathers a batch slice by slice from a
memory map, as nanoGPT does; it has the machine's own settings of malloc, the others those of gpt.py. `bare`
is our net's forward, loss, backward, clipping and fused AdamW on one batch that is in memory. `ours` is
`experiments/gpt.py`, with logging, TensorBoard, checkpoints, without validation; so are `compiled` (`--compile true`)
and `bfloat16` (`--trainer.precision bf16-mixed`). Each runs in processes of its own, in turn; a figure is the mean over
steps from the 21st on.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Found, Runs, Target
from datamodules import Text
from harness.runs import environment
from lit_modules.nets import GPT

TEXT = common.DATA / "tinyshakespeare" / "input.txt"
LAYERS, HEADS, WIDTH, BLOCK, ROWS = 4, 4, 128, 64, 12
RATE, WARM_UP, SKIPPED = 3e-3, 100, 20
EXPERIMENT = {"ours": [], "compiled": ["--compile", "true"], "bfloat16": ["--trainer.precision", "bf16-mixed"]}
TARGETS = {
    "ours / loop": Target("a step of gpt.py over the plain loop's", high=1.0),
    "ours / bare": Target("a step of gpt.py over the bare step", high=1.05),
    "compiled / loop": Target("a step with --compile true over the plain loop's"),
    "bfloat16 / loop": Target("a step in bf16-mixed over the plain loop's"),
    "fetching": Target("fetching a batch, ours over slices", high=1 / 15),
    "generation": Target("generating 255 tokens, cached over recomputed", high=1 / 3),
}


def text(path: str | Path | None) -> Text:
    """The text in this file, or Python's own documentation."""
    data = Text(path, BLOCK, batch_size=ROWS)
    data.setup()
    return data


def seconds_between(stamps: Sequence[float]) -> list[float]:
    """From each moment to the next."""
    return [stop - start for start, stop in pairwise(stamps)]


# The plain loop


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """Embeddings, blocks, norm, and a head that shares the tokens' embedding."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def slices(path: Path) -> tuple[Tensor, Tensor]:
    """A batch, slice by slice, from a memory map that is opened anew, as nanoGPT does it."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - BLOCK, (ROWS,))
    x = torch.stack([torch.from_numpy(tokens[i : i + BLOCK].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
    return x, y


def written(data: Text, folder: Path) -> Path:
    """The training text as a file of 16-bit numbers."""
    path = folder / "train.bin"
    data.split("train").text.numpy().astype(np.uint16).tofile(path)  # type: ignore[attr-defined]
    return path


def loop(path: str | None, steps: int) -> list[float]:
    """The plain loop; seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        data = text(path)
        tokens, net = written(data, Path(folder)), with_seed(0, lambda: PlainGPT(data.num_classes))
        optimizer, stamps = torch.optim.AdamW(net.parameters(), RATE, (0.9, 0.99)), []
        x, y = slices(tokens)
        for step in range(steps):
            stamps.append(time.perf_counter())
            for group in optimizer.param_groups:
                group["lr"] = RATE * min((step + 1) / WARM_UP, 1.0)
            loss = net(x, y)
            x, y = slices(tokens)  # the next one
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return seconds_between([*stamps, time.perf_counter()])


# Our side


def net_of(data: Text, *sizes: int) -> GPT:
    """Our net for this text."""
    return with_seed(0, lambda: GPT(data.num_classes, *sizes))


def bare(path: str | None, steps: int) -> list[float]:
    """Our net on one batch; seconds of each step."""
    environment.keep_memory()  # as gpt.py does
    data = text(path)
    net, batch = net_of(data, BLOCK, LAYERS, HEADS, WIDTH), data.split("train").take(torch.arange(ROWS) * BLOCK)
    optimizer, stamps = torch.optim.AdamW(net.parameters(), RATE, (0.9, 0.99), fused=True), []
    for _ in range(steps):
        stamps.append(time.perf_counter())
        loss = F.cross_entropy(net(batch.inputs).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return seconds_between([*stamps, time.perf_counter()])


def experiment(side: str, path: str | None, steps: int, env: Mapping[str, str] | None = None) -> list[float]:
    """`experiments/gpt.py` with the flags of this side; seconds of each step."""
    flags = [*EXPERIMENT[side], *([] if path is None else ["--data.path", path])]
    flags += ["--data.block_size", str(BLOCK), "--data.batch_size", str(ROWS), "--model.lr", str(RATE)]
    flags += ["--net.num_layers", str(LAYERS), "--net.num_heads", str(HEADS), "--net.embed_dim", str(WIDTH)]
    flags += ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps + 1)]
    return common.clocked("gpt", *flags, env=env)["LitLanguageModel0"]["steps"]


# Fetching and generation


def fetching(path: str | None, rounds: int = 7) -> Runs:
    """Microseconds a batch, slice by slice and by our loader, over whole epochs, in turn."""
    data = text(path)
    loader = data.train_dataloader()
    with tempfile.TemporaryDirectory() as folder:
        tokens = written(data, Path(folder))

        def microseconds(ours: bool) -> float:
            start = time.perf_counter()
            for _ in loader if ours else (slices(tokens) for _ in range(len(loader))):
                pass
            return (time.perf_counter() - start) / len(loader) * 1e6

        return common.take_turns({"slices": partial(microseconds, False), "ours": partial(microseconds, True)}, rounds)


def generation(path: str | None, rounds: int = 3) -> Runs:
    """Seconds that a net of 6 layers, 6 heads, 384 wide takes from one token to its block of 256."""
    net, prompt = net_of(text(path), 256, 6, 6, 384), torch.zeros(1, 1, dtype=torch.int64)

    def seconds(cached: bool) -> float:
        start = time.perf_counter()
        net.generate(prompt, cached=cached)
        return time.perf_counter() - start

    return common.take_turns({"recomputed": partial(seconds, False), "cached": partial(seconds, True)}, rounds)


# All


def milliseconds(steps: Sequence[float]) -> float:
    """Mean time of a step from the 21st on."""
    return mean(steps[SKIPPED:]) * 1e3


def ratios(steps: Runs, fetched: Runs, generated: Runs) -> Runs:
    """Ours over theirs."""
    found = {
        f"{ours} / {theirs}": common.over(steps[ours], steps[theirs])
        for ours, theirs in (("ours", "loop"), ("ours", "bare"), ("compiled", "loop"), ("bfloat16", "loop"))
    }
    return found | {
        "fetching": common.over(fetched["ours"], fetched["slices"]),
        "generation": common.over(generated["cached"], generated["recomputed"]),
    }


def measure(args: argparse.Namespace) -> Found:
    """All sides in turn, then fetching and generation."""
    env, path = common.threads(args.threads), None if args.data is None else str(args.data)
    rivals: dict[str, Any] = {
        "loop": lambda: milliseconds(common.called(loop, path, args.steps, env=env)),
        "bare": lambda: milliseconds(common.called(bare, path, args.steps, env=env)),
    }
    rivals |= {side: lambda side=side: milliseconds(experiment(side, path, args.steps, env=env)) for side in EXPERIMENT}
    steps = common.take_turns(rivals, args.rounds, "ms a step")
    fetched, generated = common.called(fetching, path, env=env), common.called(generation, path, env=env)
    figures = {"ms a step": steps, "µs to fetch a batch": fetched, "s for 255 tokens": generated}
    return Found(figures, ratios(steps, fetched, generated))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    command = common.parser(__doc__, ("--repeat", 3), "fits of each side, in turn")
    default = TEXT if TEXT.is_file() else None
    command.add_argument("--data", type=Path, default=default, help="a text; Python's own docs where there is none")
    command.add_argument("--steps", type=int, default=300, help="of each fit, at least 22")
    command.add_argument("--threads", type=int, help="OMP_NUM_THREADS of all; torch's own number when not given")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
