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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Rivals, Runs, Target
from datamodules import Text
from harness.runs import environment
from lab.studies.meters import Stamps
from lit_modules.nets import GPT

TEXT = common.DATA / "tinyshakespeare" / "input.txt"
LAYERS, HEADS, WIDTH, BLOCK, ROWS = 4, 4, 128, 64, 12
RATE, SKIPPED = 3e-3, 20
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
    """Return the text in this file, or Python's own documentation."""
    data = Text(path, BLOCK, batch_size=ROWS)
    data.setup()
    return data


def step_ms(net: nn.Module, loss: Callable[[], Tensor], steps: int, fused: bool = False) -> float:
    optimizer = torch.optim.AdamW(net.parameters(), RATE, (0.9, 0.99), fused=fused)
    stamps = Stamps(next(net.parameters()).device)
    stamps.mark()
    for _ in range(steps):
        loss().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stamps.mark()
    return mean(stamps.seconds()[SKIPPED:]) * 1e3


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PlainGPT(nn.Module):
    """Embeddings, blocks, norm, and a head that shares the tokens' embedding."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), labels.flatten())


def slices(path: Path) -> tuple[Tensor, Tensor]:
    """Gather a batch slice by slice from a memory map, opened for each batch as nanoGPT does."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - BLOCK, (ROWS,))
    x = torch.stack([torch.from_numpy(tokens[i : i + BLOCK].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
    return x, y


def write_tokens(data: Text, folder: str | Path) -> Path:
    path = Path(folder) / "train.bin"
    data.split("train").text.numpy().astype(np.uint16).tofile(path)  # type: ignore[union-attr]
    return path


def loop(path: str | Path | None, steps: int) -> float:
    data = text(path)
    net = with_seed(0, lambda: PlainGPT(data.num_classes))
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(data, folder)
        return step_ms(net, lambda: net(*slices(tokens)), steps)


def build_net(data: Text, block_size: int, num_layers: int, num_heads: int, embed_dim: int) -> GPT:
    return with_seed(0, lambda: GPT(data.num_classes, block_size, num_layers, num_heads, embed_dim))


def bare(path: str | Path | None, steps: int) -> float:
    """Measure milliseconds of a step of our net on one batch."""
    environment.keep_memory()  # as gpt.py does
    data = text(path)
    net, batch = build_net(data, BLOCK, LAYERS, HEADS, WIDTH), data.split("train").take(torch.arange(ROWS) * BLOCK)
    inputs, labels = batch.inputs, batch.labels.flatten()
    return step_ms(net, lambda: F.cross_entropy(net(inputs).flatten(0, 1), labels), steps, fused=True)


def size_flags(steps: int, layers: int, heads: int, width: int, block: int, rows: int) -> list[str]:
    """Return the flags of `experiments/gpt.py` for a fit of so many steps without validation."""
    sizes = {
        "data.block_size": block, "data.batch_size": rows, "net.num_layers": layers, "net.num_heads": heads,
        "net.embed_dim": width, "trainer.max_steps": steps, "trainer.val_check_interval": steps + 1,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in sizes.items()]


def experiment(side: str, path: str | Path | None, steps: int, env: Mapping[str, str] | None = None) -> float:
    """Measure milliseconds of a step of `experiments/gpt.py` with the flags of this side."""
    flags = [*EXPERIMENT[side], *size_flags(steps, LAYERS, HEADS, WIDTH, BLOCK, ROWS), f"--model.lr={RATE}"]
    flags += [] if path is None else [f"--data.path={path}"]
    return mean(common.run_clocked("gpt", *flags, env=env)["LitLanguageModel0"]["steps"][SKIPPED:]) * 1e3


def fetching(path: str | Path | None, rounds: int = 7) -> Runs:
    """Measure microseconds a batch, slice by slice and by our loader, over whole epochs, in turn."""
    data = text(path)
    loader = data.train_dataloader()
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(data, folder)

        def microseconds(ours: bool) -> float:
            batches = loader if ours else (slices(tokens) for _ in range(len(loader)))
            return common.seconds(lambda: deque(batches, maxlen=0)) / len(loader) * 1e6

        return common.take_turns({"slices": partial(microseconds, False), "ours": partial(microseconds, True)}, rounds)


def generation(path: str | Path | None, rounds: int = 3) -> Runs:
    """Measure the seconds in which a net of 6 layers, 6 heads, 384 wide generates its block of 256 from one token."""
    net, prompt = build_net(text(path), 256, 6, 6, 384), torch.zeros(1, 1, dtype=torch.int64)
    calls = {name: partial(net.generate, prompt, cached=name == "cached") for name in ("recomputed", "cached")}
    return common.take_turns({name: partial(common.seconds, call) for name, call in calls.items()}, rounds)


def ratios(steps: Runs, fetch_times: Runs, generation_times: Runs) -> Runs:
    by_name = {name: common.over(*(steps[side] for side in name.split(" / "))) for name in TARGETS if "/" in name}
    by_name["fetching"] = common.over(fetch_times["ours"], fetch_times["slices"])
    by_name["generation"] = common.over(generation_times["cached"], generation_times["recomputed"])
    return by_name


def measure(args: argparse.Namespace) -> Measurement:
    env = common.thread_variables(args.threads)
    text, steps = args.data, args.steps
    sides: Rivals = {side.__name__: partial(common.call_fresh, side, text, steps, env=env) for side in (loop, bare)}
    sides |= {side: partial(experiment, side, text, steps, env) for side in EXPERIMENT}
    step_times = common.take_turns(sides, args.rounds, "ms a step")
    fetch_times, generation_times = (common.call_fresh(part, args.data, env=env) for part in (fetching, generation))
    figures = {"ms a step": step_times, "µs to fetch a batch": fetch_times, "s for 255 tokens": generation_times}
    return Measurement(figures, ratios(step_times, fetch_times, generation_times))


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 3), "fits of each side, in turn")
    default = TEXT if TEXT.is_file() else None
    command.add_argument("--data", type=Path, default=default, help="a text; Python's own docs where there is none")
    command.add_argument("--steps", type=int, default=300, help="of each fit, at least 22")
    command.add_argument("--threads", type=int, help="OMP_NUM_THREADS of all; torch's own number when not given")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
