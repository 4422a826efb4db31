"""What a step costs beyond its arithmetic: a Trainer with Distillation, and with the least module, over a bare loop.

    python benchmarks/step_speed.py                        # one thread: a minute or two
    python benchmarks/step_speed.py --repeat 1 --steps 50

All train one student by cross-entropy on the embedded Digits, in batches of 128, with Adam, from the same images in
memory: a linear classifier, whose bare step takes 0.3 to 0.6 ms, and LightNN, 2 to 5 ms. `ours` is Distillation with
our data module and the defaults of kd.py; `lightning` a LightningModule of six lines with a DataLoader of whole
batches; `bare` a loop of forward, loss, backward and step. Nothing writes to disk. Medians of single steps, in turn.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Runs, Target
from datamodules import Digits
from lab.studies.meters import Stamps
from lit_modules.distillation import Distillation
from lit_modules.nets import LightNN, Net
from lit_modules.objectives import CrossEntropy

BATCH, WARMUP = 128, 20


class Linear(Net):
    """One matrix: a step is all overhead."""

    def __init__(self, input_shape: tuple[int, ...] = Digits.input_shape, num_classes: int = 10) -> None:
        super().__init__()
        self.classifier = nn.Linear(torch.Size(input_shape).numel(), num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        return self.classifier(inputs.flatten(1))


NETS: dict[str, type[Net]] = {"linear": Linear, "LightNN": LightNN}
TARGETS = {
    "linear": Target("a step of a linear classifier: Distillation in a Trainer over a bare loop", high=1.5),
    "LightNN": Target("a step of LightNN on Digits: Distillation in a Trainer over a bare loop", high=1.1),
    "linear, lightning": Target("a step of a linear classifier: the least LightningModule over a bare loop"),
    "LightNN, lightning": Target("a step of LightNN on Digits: the least LightningModule over a bare loop"),
}


def build_net(name: str) -> nn.Module:
    return with_seed(0, partial(NETS[name], Digits.input_shape))


def batches() -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """Return a function that passes once over the training images as floats (b, 1, 8, 8) and labels (b,)."""
    data = Digits(validation_size=0)
    images, labels = data.samples("train", torch.arange(data.sizes["train"]))

    def one_pass() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(images)).split(BATCH):
            yield images[rows], labels[rows]

    return one_pass


def bare(name: str, steps: int) -> float:
    net, one_pass, stamps = build_net(name), batches(), Stamps(common.CPU)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(1 + (WARMUP + steps) // 10):
        for images, labels in one_pass():
            stamps.mark()
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    return 1e3 * median(stamps.seconds()[WARMUP:])


class Least(LightningModule):
    """The least that a Trainer needs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def lightning(name: str, steps: int) -> float:
    """Measure milliseconds of a step of the least module."""
    pairs = list(batches()())
    stacked = TensorDataset(*(torch.stack(part) for part in zip(*pairs[:-1], strict=True)))  # an item is a batch
    loader = DataLoader(stacked, batch_size=None)
    return 1e3 * median(common.step_seconds(Least(build_net(name)), loader, steps, WARMUP))


def ours(name: str, steps: int) -> float:
    students = {"ce": (build_net(name), CrossEntropy())}
    module = Distillation(build_net("LightNN"), students, input_shape=Digits.input_shape)
    return 1e3 * median(common.step_seconds(module, Digits(batch_size=BATCH, validation_size=0), steps, WARMUP))


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    rivals = {"bare": bare, "lightning": lightning, "ours": ours}
    calls = {f"{net}, {side}": partial(call, net, args.steps) for net in NETS for side, call in rivals.items()}
    runs: Runs = common.take_turns(calls, args.rounds, "ms")
    ratios = {net: common.over(runs[f"{net}, ours"], runs[f"{net}, bare"]) for net in NETS}
    ratios |= {f"{net}, lightning": common.over(runs[f"{net}, lightning"], runs[f"{net}, bare"]) for net in NETS}
    return Measurement({"ms a step": runs}, ratios)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 5), "rounds in which rivals take turns")
    command.add_argument("--steps", type=int, default=500, help="that are timed of each fit")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
