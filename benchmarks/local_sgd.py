"""Local SGD against data parallelism: loss by steps and by seconds, for several periods, with SGD and with Adam.

    python benchmarks/local_sgd.py --devices 2 --epochs 12 --out local_sgd.json

Each line is a fit of DeepNN on the embedded Digits with a global batch of 128, in ranks forked from this process. The
losses are cross-entropies of the 144 held-out images by the ranks' average, after a third of the steps, two thirds and
all. `seconds` are those of the training loop, without start-up. One seed: differences below 0.02 are noise.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from apprentice.keyed import with_seed
from benchmarks import common
from datamodules import Digits
from harness.runs import environment
from harness.runs.quiet import quiet
from lab.strategies import LocalSGD
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN
from strategies import DDP

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),  # each rank has momentum of its own
    "adam": partial(torch.optim.Adam, lr=1e-3),  # as in the bake-off
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=common.out_file(), default="local_sgd.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    print("optimizer  strategy      loss at 1/3   at 2/3   at the end   steps   seconds")
    for label, optimizer in OPTIMIZERS.items():
        strategies = {"ddp": DDP()} | {f"local_sgd k={k}": LocalSGD(period=k) for k in options.periods}
        for name, strategy in strategies.items():
            module = LitClassifier(with_seed(0, partial(DeepNN, Digits.input_shape)), optimizer=optimizer)
            settings = {"devices": options.devices, "max_epochs": options.epochs, "num_sanity_val_steps": 0}
            with quiet():
                record = common.fit(module, Digits(), strategy=strategy, **settings)
            losses, seconds = record["losses"], sum(record["steps"])
            thirds = [losses[len(losses) * third // 3 - 1][1] for third in (1, 2, 3)]
            numbers = f"{thirds[0]:11.3f}  {thirds[1]:7.3f}  {thirds[2]:11.3f}  {losses[-1][0]:6}  {seconds:8.1f}"
            print(f"{label:9}  {name:13}{numbers}", flush=True)
            rows.append({"optimizer": label, "strategy": name, "losses": losses, "seconds": seconds})
    machine = {"hardware": environment.hardware(), "versions": environment.versions()}
    common.write_figures(options.out, "local_sgd", {"devices": options.devices, **machine, "rows": rows})


if __name__ == "__main__":
    main()
