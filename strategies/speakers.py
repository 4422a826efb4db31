"""What a LightningModule logs, shard by shard or batch by batch, put together so that it speaks once."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

Said = dict[str, Any]  # the arguments of `LightningModule.log`, but for the name


@contextmanager
def caught(module: LightningModule) -> Iterator[dict[str, Said]]:
    """Keep what the module logs inside the block from Lightning; of a metric object its path in the module is kept."""
    logged: dict[str, Said] = {}
    to_lightning = module.log

    def log(*args: Any, **kwargs: Any) -> None:
        said = dict(inspect.signature(to_lightning).bind(*args, **kwargs).arguments)
        name, value = said.pop("name"), said["value"]
        if isinstance(value, Metric | MetricCollection):
            said["value"] = next(path for path, inner in module.named_modules() if inner is value)
        elif isinstance(value, Tensor):
            said["value"] = value.detach().double().mean()
        else:
            said["value"] = torch.tensor(value, dtype=torch.float64)
        logged[name] = said

    module.log = log  # type: ignore[method-assign]
    try:
        yield logged
    finally:
        del module.log


class Speaker:
    """A LightningModule that is heard for each shard of a batch, and speaks of the whole batch once.

    Attributes:
        heard: by name, what it said of the last shard.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.heard: dict[str, Said] = {}

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a shard."""
        with caught(self.module) as self.heard:
            output = self.module.training_step(batch, *args, **kwargs)
        if output is None:
            raise ValueError("--exact: expected a training_step that returns a loss for every shard, not None")
        return output["loss"] if isinstance(output, Mapping) else output

    def values(self) -> list[Tensor]:
        """The values of that shard: means over its rows."""
        values = (said["value"] for said in self.heard.values())
        return [value.to(self.module.device) for value in values if isinstance(value, Tensor)]

    @property
    def names(self) -> list[str]:
        """The names of these values."""
        return [name for name, said in self.heard.items() if isinstance(said["value"], Tensor)]

    def speak(self, means: Sequence[float], count: int) -> Iterable[nn.Parameter]:
        """Log the means over the global batch of `count` rows; returns the parameters that are to take no step."""
        known = dict(zip(self.names, means, strict=True))
        for name, said in self.heard.items():
            if name in known:
                self.module.log(name, **said | {"value": known[name], "batch_size": count, "sync_dist": False})
            else:
                log_metric(self.module, name, said)
        return []


def log_metric(module: LightningModule, name: str, said: Said) -> None:
    """Log a metric object that the module has logged in a step: once an epoch, as a step's value is only a shard's."""
    value = module.get_submodule(said["value"])
    module.log(name, **said | {"value": value, "on_step": False, "on_epoch": True})


class Informed(Speaker):
    """One that has a `shard_step` and an `on_global_batch`."""

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a shard."""
        loss, values = self.module.shard_step(batch)  # type: ignore[operator]
        self.heard = {name: {"value": value.detach().double().mean()} for name, value in values.items()}
        return loss

    def speak(self, means: Sequence[float], count: int) -> Iterable[nn.Parameter]:
        """Let it act on the global batch."""
        return self.module.on_global_batch(dict(zip(self.heard, means, strict=True)), count)  # type: ignore[operator]


def speaker_of(module: LightningModule) -> Speaker:
    """What hears a module."""
    return Informed(module) if hasattr(module, "shard_step") else Speaker(module)


class Record(NamedTuple):
    """What was logged in a batch of an evaluation."""

    batch: int
    rows: int
    name: str
    said: Said


REDUCTIONS: dict[str, Callable[[list[float], list[int]], float]] = {
    "mean": lambda values, rows: sum(v * n for v, n in zip(values, rows, strict=True)) / sum(rows),
    "sum": lambda values, _: sum(values),
    "max": lambda values, _: max(values),
    "min": lambda values, _: min(values),
}


def combined(records: Iterable[Record]) -> dict[str, Said]:
    """What is logged at the evaluation's end: values in the order of the batches, reduced as they were to be."""
    by_name: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.batch):
        by_name.setdefault(record.name, []).append(record)
    return {name: _combined(found) for name, found in by_name.items()}


def _combined(found: list[Record]) -> Said:
    said = {key: value for key, value in found[0].said.items() if key not in {"on_step", "sync_dist"}}
    said |= {"on_epoch": True, "batch_size": 1}
    if isinstance(said["value"], Tensor):
        reduce = REDUCTIONS[str(said.get("reduce_fx", "mean"))]
        said["value"] = reduce([record.said["value"].item() for record in found], [record.rows for record in found])
    return said
