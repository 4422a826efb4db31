"""What a step costs over torch.distributed.rpc, as ratios to `ddp` in one run.

    python benchmarks/rpc_speed.py                        # some minutes on 2 cores
    python benchmarks/rpc_speed.py --devices 2 --rounds 5 --out FILE
    python benchmarks/rpc_speed.py --quick                # seconds: few steps, whose figures say nothing

Seconds from one batch to the next on rank zero, by the median of a fit's steps but for the first: the same net,
batches of 128 images over all devices, one thread a process. `param_server` has one worker less than there are devices,
and waits for every step ("late": its workers may lack two); `rpc_hybrid` has one less, too. Rivals take turns: a ratio
is of one round, and told is the median. It ends with exit code 1 where `param_server` takes more than 5 times as long
as `ddp`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from apprentice.keyed import with_seed
from benchmarks.hardware_speed import Noise
from harness.runs import environment
from harness.runs.files import write_json
from harness.runs.progress import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN, LightNN
from strategies import DDP, DataParallel, ParamServer, RPCHybrid

TARGET = 5.0
NETS = {"LightNN": LightNN, "DeepNN": DeepNN}
RIVALS: dict[str, Callable[[], DataParallel]] = {
    "ddp": DDP,
    "param_server": ParamServer,
    "param_server, late": lambda: ParamServer(max_staleness=2),
    "rpc_hybrid": RPCHybrid,
}


class Steps(Callback):
    """Writes the seconds of each step.

    Args:
        file: where.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._moments: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """A step begins here, and the one before ends."""
        self._moments.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all but the first, in which buffers are made and connections opened."""
        if trainer.is_global_zero:
            self.file.write_text(json.dumps([b - a for a, b in pairwise(self._moments)][1:]))


def seconds(name: str, net: str, devices: int, steps: int) -> float:
    """The median step of a fit."""
    data = Noise(128, validation_size=0)
    data.setup()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        trainer = Trainer(
            accelerator="cpu", devices=devices, strategy=RIVALS[name](), max_steps=steps, max_epochs=-1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Steps(file)],
        )  # fmt: skip
        trainer.fit(LitClassifier(with_seed(0, NETS[net])), data)
        return median(json.loads(file.read_text()))


def compared(net: str, devices: int, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, and of each rival the median of its ratios to `ddp`."""
    found: dict[str, list[float]] = {name: [] for name in RIVALS}
    for _ in range(rounds):
        for name, measured in found.items():
            measured.append(seconds(name, net, devices, steps))
    ratios = {name: median(a / b for a, b in zip(found[name], found["ddp"], strict=True)) for name in RIVALS}
    return {"seconds": found, "ratios": ratios}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=3, help="processes")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--steps", type=int, default=24, help="of a fit")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each rival")
    parser.add_argument("--quick", action="store_true", help="one short round of the smaller net, and no verdict")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    args = parser.parse_args(argv)
    if args.quick:
        args.nets, args.steps, args.rounds = ["LightNN"], 4, 1
    environment.keep_memory()
    torch.set_num_threads(1)
    header = {"devices": args.devices, "rounds": args.rounds, "steps": args.steps, **environment.setting()}
    with quiet():
        nets = {net: compared(net, args.devices, args.steps, args.rounds) for net in args.nets}
    print(*(f"{key}: {value}" for key, value in header.items()), sep="\n")
    print(f"{'net':10}{'strategy':22}{'step, ms':>10}{'to ddp':>9}")
    for net, figures in nets.items():
        for name, ratio in figures["ratios"].items():
            print(f"{net:10}{name:22}{1e3 * median(figures['seconds'][name]):10.1f}{ratio:9.2f}")
    if args.out:
        write_json(args.out, {"benchmark": "rpc_speed", **header, "nets": nets})
    missed = [net for net, figures in nets.items() if figures["ratios"]["param_server"] > TARGET]
    if missed and not args.quick:
        sys.exit(f"param_server takes more than {TARGET:g} times as long as ddp a step: {', '.join(missed)}")


if __name__ == "__main__":
    main()
