"""Attention kernels of torch: which is fastest on this machine, for which type and length.

    python experiments/attention.py                                        # all of it: minutes on 2 CPU cores
    python experiments/attention.py --parts kernels --lengths 1024 4096 --dtypes bfloat16
    python experiments/attention.py --backends math flash --head_dim 128
    python experiments/attention.py --out FOLDER --resume true             # go on; measured rows are kept
    python experiments/attention.py --quick true                           # small sizes, to see what comes out

The experiment of PyTorch's tutorial on scaled dot product attention, as a study: kernels by themselves, forward and
backward; a block of self-attention, dense and jagged, eager and compiled; our layers beside torch's; the tutorial's own
shapes beside the figures it prints; a profile of the causal block. Lists what the machine can't run with torch's
reason. OUT/ holds report.html, results.json and .md, kernels.png, blocks.png, and Chrome traces of the block, eager and
compiled.
"""

from harness import start

if __name__ == "__main__":
    start.script()

from collections.abc import Sequence

import torch

from apprentice.errors import BadInput
from harness import cli
from harness.runs.session import session
from lab.studies.attention import Bench, Options, Study, all_cases
from lab.studies.isolation import one_thread


def parser() -> cli.Parser:
    """Make the command line: parts, kernels, types and sizes."""
    return cli.Parser("attention.py", (__doc__ or "").split("\n", 1)[0], Options)


def pick_device(name: str) -> torch.device:
    """Return the device to measure on; initialise CUDA, so that the results have the GPU's name."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise BadInput("device", name, "auto or cpu: torch sees no GPU here")
    if name == "cpu" or not available:
        return torch.device("cpu")
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line describes."""
    with one_thread() as threads, session("attention", parser(), argv) as run:
        run.announce()
        config = run.config
        device = pick_device(config.device)
        cases = all_cases(config, device.type)
        bench = Bench(device, config.seconds, threads)
        with run.folder():
            Study(run, config.longest, device=device.type, threads=threads).run(bench, cases)


if __name__ == "__main__":
    start.run(main)
