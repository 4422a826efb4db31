"""One training step of experiments/gpt.py beside a plain loop, fetching a batch, and generation with and without cache.

    python benchmarks/gpt_speed.py                      # about ten minutes on 2 cores
    python benchmarks/gpt_speed.py --out FILE --steps 300 --repeat 3 --threads 2

All train nanoGPT's small CPU recipe: 4 layers, 4 heads, 128 wide, blocks of 64, batches of 12, no dropout, AdamW,
float32. `loop` is a plain loop with a plain net, both written out below, that gathers a batch slice by slice from a
memory map, as nanoGPT does; it has the machine's own settings of malloc, the others those of gpt.py. `bare`
is our net's forward, loss, backward, clipping and fused AdamW on one batch that is there already. `ours` is
`experiments/gpt.py`, with logging, TensorBoard, checkpoints, without validation; so are `compiled` (`--compile true`)
and `bfloat16` (`--trainer.precision bf16-mixed`). Each runs in processes of its own, in turn; a figure is the mean over
steps from the 21st on, the median of all turns.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from datamodules import Text
from harness.runs import environment
from lit_modules.nets import GPT

TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
LAYERS, HEADS, WIDTH, BLOCK, ROWS = 4, 4, 128, 64, 12
RATE, WARM_UP, SKIPPED = 3e-3, 100, 20
SIDES = ("loop", "bare", "ours", "compiled", "bfloat16")
TARGETS = {"ours / loop": 1.0, "ours / bare": 1.05, "fetching": 1 / 15, "generation": 1 / 3}  # the most that may be


def text(path: Path | None) -> Text:
    """The text in this file, or Python's own documentation."""
    data = Text(path, BLOCK, batch_size=ROWS)
    data.setup()
    return data


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
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 0.02
                )

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


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Parameters that decay, and those that don't."""
    parameters = list(net.parameters())
    matrices, others = ([p for p in parameters if (p.dim() > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def rate(step: int, steps: int) -> float:
    """Warm-up, then a half cosine to a tenth."""
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1))))


def loop(path: Path | None, steps: int) -> list[float]:
    """The plain loop; when each step began, and the end."""
    with tempfile.TemporaryDirectory() as folder:
        data = text(path)
        tokens, net = written(data, Path(folder)), with_seed(0, lambda: PlainGPT(data.num_classes))
        optimizer, stamps = torch.optim.AdamW(groups(net), RATE, (0.9, 0.99)), []
        x, y = slices(tokens)
        for step in range(steps):
            stamps.append(time.perf_counter())
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps)
            loss = net(x, y)
            x, y = slices(tokens)  # the next one
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                print(f"loop  step {step}  loss {loss.item():.4f}", flush=True)
    return [*stamps, time.perf_counter()]


# Our side


def net_of(data: Text, *sizes: int) -> GPT:
    """Our net for this text."""
    return with_seed(0, lambda: GPT(data.num_classes, *sizes))


def bare(path: Path | None, steps: int) -> list[float]:
    """Our net on one batch; when each step began, and the end."""
    environment.keep_memory()  # as gpt.py does
    data = text(path)
    net, batch = net_of(data, BLOCK, LAYERS, HEADS, WIDTH), data.split("train").take(torch.arange(ROWS) * BLOCK)
    optimizer, stamps = torch.optim.AdamW(groups(net), RATE, (0.9, 0.99), fused=True), []
    for _ in range(steps):
        stamps.append(time.perf_counter())
        loss = F.cross_entropy(net(batch.inputs).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*stamps, time.perf_counter()]


def experiment(*flags: str) -> Callable[[Path | None, int], list[float]]:
    """`experiments/gpt.py` with these flags; when each step began, and the end."""

    def measured(path: Path | None, steps: int) -> list[float]:
        from experiments import gpt
        from lit_modules.language_model import LitLanguageModel

        stamps: list[float] = []
        clock = partial(mock.patch.object, LitLanguageModel, new=lambda *_: stamps.append(time.perf_counter()))
        text_flags = [] if path is None else ["--data.path", str(path)]
        sizes = ["--data.block_size", str(BLOCK), "--data.batch_size", str(ROWS), "--model.lr", str(RATE)]
        sizes += ["--net.num_layers", str(LAYERS), "--net.num_heads", str(HEADS), "--net.embed_dim", str(WIDTH)]
        length = ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps + 1)]
        with tempfile.TemporaryDirectory() as out, clock("on_train_batch_start"), clock("on_train_end"):
            gpt.main([*text_flags, *sizes, *length, *flags, "--overwrite", "true", "--out", out])
        return stamps

    return measured


STEPS: dict[str, Callable[[Path | None, int], list[float]]] = {
    "loop": loop,
    "bare": bare,
    "ours": experiment(),
    "compiled": experiment("--compile", "true"),
    "bfloat16": experiment("--trainer.precision", "bf16-mixed"),
}


# Fetching and generation


def fetching(path: Path | None) -> dict[str, float]:
    """Microseconds a batch, slice by slice and by our loader, whose epochs are whole, in turn; medians."""
    data = text(path)
    found: dict[str, list[float]] = {"slices": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        tokens, loader = written(data, Path(folder)), data.train_dataloader()
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(len(loader)):
                slices(tokens)
            middle = time.perf_counter()
            for _ in loader:
                pass
            found["slices"].append((middle - start) / len(loader) * 1e6)
            found["ours"].append((time.perf_counter() - middle) / len(loader) * 1e6)
    return {name: median(times) for name, times in found.items()}


def generation(path: Path | None, times: int) -> dict[str, float]:
    """Seconds that a net of 6 layers, 6 heads, 384 wide takes from one token to its block of 256; medians."""
    net = net_of(text(path), 256, 6, 6, 384)
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    found: dict[str, list[float]] = {"recomputed": [], "cached": []}
    for _ in range(times):
        for name, seconds in found.items():
            start = time.perf_counter()
            net.generate(prompt, cached=name == "cached")
            seconds.append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in found.items()}


# All


def in_a_process(side: str, path: Path | None, steps: int, threads: int | None) -> list[float]:
    """What a side measures in a fresh process; what it prints goes to stderr."""
    with tempfile.NamedTemporaryFile("r") as answer:
        command = [sys.executable, __file__, "--side", side, "--steps", str(steps), "--out", answer.name]
        command += [] if path is None else ["--data", str(path)]
        given = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        subprocess.run(command, env=given, stdout=sys.stderr, check=True)
        return json.load(answer)


def milliseconds(stamps: Sequence[float]) -> float:
    """Mean time of a step from the 21st on."""
    return (stamps[-1] - stamps[SKIPPED]) / (len(stamps) - 1 - SKIPPED) * 1e3


def ratios(steps: dict[str, float], fetched: dict[str, float], generated: dict[str, float]) -> dict[str, float]:
    """Ours over theirs."""
    found = {"ours / loop": steps["ours"] / steps["loop"], "ours / bare": steps["ours"] / steps["bare"]}
    found |= {f"{name} / loop": steps[name] / steps["loop"] for name in ("compiled", "bfloat16")}
    return found | {
        "fetching": fetched["ours"] / fetched["slices"],
        "generation": generated["cached"] / generated["recomputed"],
    }


def table(found: dict[str, Any]) -> str:
    """All figures, a line each."""
    lines = [f"{name:24}{value:10.2f} ms a step" for name, value in found["steps"].items()]
    lines += [f"{'fetching, ' + name:24}{value:10.1f} µs a batch" for name, value in found["fetching"].items()]
    lines += [
        f"{'generation, ' + name:24}{value:10.2f} s for 255 tokens" for name, value in found["generation"].items()
    ]
    for name, ratio in found["ratios"].items():
        target = f"   target: at most {TARGETS[name]:.3g}" if name in TARGETS else ""
        lines.append(f"{name:24}{ratio:10.3f} = 1/{1 / ratio:.1f}{target}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=TEXT if TEXT.is_file() else None, help="a text; Python's own docs")
    parser.add_argument("--steps", type=int, default=300, help="of each fit, at least 22")
    parser.add_argument("--repeat", type=int, default=3, help="fits of each side, in turn")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of all; torch's own number when not given")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument("--side", choices=(*SIDES, "rest"), help=argparse.SUPPRESS)  # in the sub-process
    args = parser.parse_args(argv)
    if args.side == "rest":
        rest = [fetching(args.data), generation(args.data, 3)]
        args.out.write_text(json.dumps(rest))
        return
    if args.side:
        args.out.write_text(json.dumps(STEPS[args.side](args.data, args.steps)))
        return
    setting = environment.setting()
    turns: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.repeat):
        for side in SIDES:
            turns[side].append(milliseconds(in_a_process(side, args.data, args.steps, args.threads)))
    fetched, generated = in_a_process("rest", args.data, args.steps, args.threads)
    steps = {side: median(values) for side, values in turns.items()}
    found = {
        "benchmark": "gpt_speed", **setting, "threads": args.threads or torch.get_num_threads(), "turns": turns,
        "steps": steps, "fetching": fetched, "generation": generated, "ratios": ratios(steps, fetched, generated),
    }  # fmt: skip
    shown = ("date", "load_before", "hardware", "versions", "threads")
    print(*(f"{key}: {found[key]}" for key in shown), table(found), sep="\n")
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
