"""Local SGD against data parallelism: loss by steps and by seconds, for several periods, with SGD and with Adam.

    python benchmarks/local_sgd.py --devices 2 --epochs 12 --out local_sgd.json

Each line is a fit of DeepNN on the embedded Digits with a global batch of 128, in ranks forked from this process. The
losses are cross-entropies of the 144 held-out images by the ranks' average, after a third of the steps, two thirds and
all. `seconds` are those of the training loop, without start-up. One seed: differences below 0.02 are noise.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from apprentice.keyed import with_seed
from benchmarks import common
from datamodules import Digits
from harness.runs.environment import hardware, versions
from harness.runs.files import write_json
from harness.runs.progress import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN
from strategies import DDP, DataParallel, LocalSGD

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),  # each rank has momentum of its own
    "adam": partial(torch.optim.Adam, lr=1e-3),  # as in the bake-off
}


class Losses(Callback):
    """Writes validation losses by step and the seconds of training.

    Args:
        file: where.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.losses = file, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the epoch's loss."""
        self.losses.append((trainer.global_step, trainer.callback_metrics["val/loss"].item()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file, on rank zero."""
        if trainer.is_global_zero:
            write_json(self.file, {"losses": self.losses, "seconds": time.perf_counter() - self.started})


def fit(strategy: DataParallel, optimizer: Any, devices: int, epochs: int) -> dict[str, Any]:
    """`losses` and `seconds` of one fit."""
    net = with_seed(0, lambda: DeepNN(input_shape=Digits.input_shape))
    with tempfile.TemporaryDirectory() as folder, quiet():
        file = Path(folder) / "losses.json"
        settings: dict[str, Any] = {"devices": devices, "max_epochs": epochs, "num_sanity_val_steps": 0}
        trainer = Trainer(strategy=strategy, callbacks=[Losses(file)], **common.SILENT, **settings)
        trainer.fit(LitClassifier(net, optimizer=optimizer), Digits())
        return json.loads(file.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    """Run all fits and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=Path("local_sgd.json"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    print("optimizer  strategy      loss at 1/3   at 2/3   at the end   steps   seconds")
    for label, optimizer in OPTIMIZERS.items():
        made = {"ddp": DDP()} | {f"local_sgd k={k}": LocalSGD(period=k) for k in options.periods}
        for name, strategy in made.items():
            found = fit(strategy, optimizer, options.devices, options.epochs)
            losses = found["losses"]
            shown = [losses[len(losses) * third // 3 - 1][1] for third in (1, 2, 3)]
            numbers = f"{shown[0]:11.3f}  {shown[1]:7.3f}  {shown[2]:11.3f}  {losses[-1][0]:6}  {found['seconds']:8.1f}"
            print(f"{label:9}  {name:13}{numbers}", flush=True)
            rows.append({"optimizer": label, "strategy": name, **found})
    facts = {"devices": options.devices, "hardware": hardware(), "versions": versions(), "rows": rows}
    write_json(options.out, facts)


if __name__ == "__main__":
    main()
