"""Local SGD against data parallelism: loss by steps and by seconds, for several periods, with SGD and with Adam.

    python benchmarks/local_sgd.py --devices 2 --epochs 12 --out local_sgd.json

Each line is a fit of DeepNN on the embedded Digits with a global batch of 128, in ranks forked from this process; the
losses are cross-entropies of the 144 held-out images by the ranks' average, after a third of the steps, two thirds and
all; `seconds` are of the training loop, without start-up. One seed: differences below 0.02 are noise.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from apprentice.keyed import with_seed
from datamodules import Digits
from harness.runs.environment import hardware, versions
from harness.runs.progress import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN
from strategies import DDP, DataParallel, LocalSGD


def sgd(params: Any) -> torch.optim.Optimizer:
    """SGD with momentum, whose buffers are a rank's own."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    """Adam as the bake-off has it."""
    return torch.optim.Adam(params, lr=1e-3)


class Told(Callback):
    """Validation losses by step and seconds of training; rank zero leaves them in a file for its parent."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses = path, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the epoch's loss."""
        self.losses.append((trainer.global_step, trainer.callback_metrics["val/loss"].item()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell."""
        if trainer.is_global_zero:
            seconds = time.perf_counter() - self.started
            self.path.write_text(json.dumps({"losses": self.losses, "seconds": seconds}))


def run(strategy: DataParallel, optimizer: Any, options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """One fit."""
    data = Digits()
    data.setup()
    net = with_seed(0, lambda: DeepNN(input_shape=data.input_shape))
    with quiet():
        trainer = Trainer(
            accelerator="cpu", devices=options.devices, strategy=strategy, max_epochs=options.epochs, logger=False,
            callbacks=[Told(path)], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(LitClassifier(net, optimizer=optimizer), data)
    return json.loads(path.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=Path("local_sgd.json"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    print("optimizer  strategy      loss at 1/3   at 2/3   at the end   steps   seconds")
    for optimizer in (sgd, adam):
        made = {"ddp": DDP()} | {f"local_sgd k={k}": LocalSGD(period=k) for k in options.periods}
        for name, strategy in made.items():
            found = run(strategy, optimizer, options, options.out.with_suffix(".tmp"))
            losses = found["losses"]
            shown = [losses[len(losses) * third // 3 - 1][1] for third in (1, 2, 3)]
            numbers = f"{shown[0]:11.3f}  {shown[1]:7.3f}  {shown[2]:11.3f}  {losses[-1][0]:6}  {found['seconds']:8.1f}"
            print(f"{optimizer.__name__:9}  {name:13}{numbers}", flush=True)
            rows.append({"optimizer": optimizer.__name__, "strategy": name, **found})
    facts = {"devices": options.devices, "hardware": hardware(), "versions": versions(), "rows": rows}
    options.out.with_suffix(".tmp").unlink()
    options.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
