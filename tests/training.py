"""Small fits for tests: any number of processes, forked from this one, with what they logged and ended with."""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

import strategies
from apprentice.keyed import with_seed
from datamodules import Digits
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN, ResNet
from lit_modules.objectives import Cosine, CrossEntropy, Hint, Hinton, Objective
from strategies import DDP
from tests import waiting

VARIANTS: dict[str, type[Objective]] = {"ce": CrossEntropy, "kd": Hinton, "cosine": Cosine, "hint": Hint}
SHAPE = (1, 8, 8)


class LinesLogger(Logger):
    """Keeps what is logged in a file, so that the process that forked the ranks can read it."""

    name = version = "lines"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**metrics, "step": step}) + "\n")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def values(self, tag: str) -> list[float]:
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [row[tag] for row in rows if tag in row]


def digits(**kwargs: Any) -> Digits:
    """101 images in batches of 37: neither 2, 3 nor 8 divides the set or any batch."""
    options = {"batch_size": 37, "train_size": 101, "test_size": 100, "validation_size": 0} | kwargs
    data = Digits(**options)
    data.setup()
    return data


def net(make: type[nn.Module] = LightNN, seed: int = 0, **kwargs: Any) -> nn.Module:
    return with_seed(seed, lambda: make(input_shape=SHAPE, **kwargs))


def distillation(names: list[str] | None = None, **kwargs: Any) -> Distillation:
    return distil({name: VARIANTS[name.rstrip("2")]() for name in names or VARIANTS}, **kwargs)


def distil(objectives: Mapping[str, Objective], teacher: nn.Module | None = None, **options: Any) -> Distillation:
    """Students, each a net of its own and an objective."""
    students = {name: (net(), objective) for name, objective in objectives.items()}
    return Distillation(teacher or net(DeepNN, seed=1), students, **{"input_shape": SHAPE} | options)


def classifier(make: type[nn.Module] = LightNN, **kwargs: Any) -> LitClassifier:
    return LitClassifier(net(make, **kwargs))


MODULES: dict[str, Callable[[], LightningModule]] = {
    "students": distillation,
    "teacher": lambda: classifier(DeepNN),
    "resnet8": lambda: classifier(ResNet, depth=8),
}
TAGS = {"students": "hint/train/loss", "teacher": "train/loss", "resnet8": "train/loss"}


def trainer(devices: int = 1, **kwargs: Any) -> Trainer:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "max_epochs": 2, "logger": False}
    options |= {"strategy": DDP(timeout=60) if devices > 1 else "auto", "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return Trainer(**options | kwargs)


def on(place: str, **more: Any) -> dict[str, Any]:
    """Options of `fit` for a strategy, by name, and its devices: "ddp 3", "pipeline 2 exact 4", "auto 1"."""
    name, devices, *shards = place.split()
    if name == "auto":
        return {"devices": int(devices)}
    path, options = strategies.NAMES[name]
    exact = {"exact": int(shards[1])} if shards else {}
    return {"devices": int(devices), "strategy": resolve_name(path)(timeout=60, **options, **exact, **more)}


def fit(module: LightningModule, data: Digits, devices: int = 1, **kwargs: Any) -> LightningModule:
    """The module, fitted; no process is left."""
    with quiet():
        trainer(devices, **kwargs).fit(module, data)
    # A worker that has been told to end may take a moment.
    pids = [child.pid for child in multiprocessing.active_children() if child.pid]
    assert waiting.wait(lambda: not multiprocessing.active_children(), lambda: pids, 10)
    return module


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], atol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=atol, msg=lambda m, key=key: f"{key}: {m}")


def near_ties(logits: torch.Tensor) -> int:
    """In how many rows the two largest are so near that another batch size or processor may choose the other."""
    first, second = logits.topk(2, -1).values.unbind(-1)
    return int((first - second < 1e-5).sum())


Outcome = tuple[list[float], dict[str, torch.Tensor]]


def outcome(
    module: LightningModule, data: Any, folder: Path, tags: Iterable[str], devices: int = 1, **options: Any
) -> Outcome:
    """What a fit has logged at its steps under these tags, and the weights at its end."""
    logger = LinesLogger(folder / f"{len(list(folder.iterdir()))}.jsonl")
    fit(module, data, devices, **{"logger": logger, "log_every_n_steps": 1} | options)
    return [value for tag in tags for value in logger.values(tag)], weights(module)


def assert_agree(one: Outcome, other: Outcome, atol: float = 1e-9) -> None:
    assert one[0]
    assert other[0] == pytest.approx(one[0], abs=atol, rel=0)
    assert_same(one[1], other[1], atol=atol)
