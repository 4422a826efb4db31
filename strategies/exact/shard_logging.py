"""What a LightningModule logs, shard by shard or batch by batch, put together so that it speaks once."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype, _Metadata
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torchmetrics import Metric

from apprentice import replicas
from strategies.exact import collectives
from strategies.exact.shards import mean_over_rows


class Logged(NamedTuple):
    """A call of `LightningModule.log` in a step, as Lightning has understood it.

    Attributes:
        hook: the step.
        name: without what Lightning adds, such as `_epoch` and the loader's number.
        value: of no dimension; of a metric object what its forward gave, None where that is not logged.
        metric: a metric object's path in the module.
        options: the other arguments.
    """

    hook: str
    name: str
    value: Tensor | None
    metric: str | None
    options: dict[str, Any]

    @property
    def batch_size(self) -> int | None:
        """The rows that the value stands for, where the module has said it."""
        return self.options["batch_size"]

    @property
    def is_mean(self) -> bool:
        """Whether values are averaged, weighted by their rows."""
        return self.metric is not None or self.options["reduce_fx"] is torch.mean

    def combined(self, values: Sequence[float], weights: Sequence[float]) -> Tensor:
        """One value of those of all shards, by `reduce_fx`; `weights` are those of a mean."""
        if self.is_mean:
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            found = torch.tensor(total, dtype=torch.float64) / sum(weights)
        else:
            found = self.options["reduce_fx"](torch.tensor(values, dtype=torch.float64))
        assert self.value is not None
        kept = self.value.dtype in {torch.float32, torch.float64}
        return found.to(self.value.dtype if kept else _get_default_dtype())


@contextmanager
def caught(module: LightningModule) -> Iterator[list[Logged]]:
    """Keep what the module logs inside the block from Lightning's results, after Lightning's own checks of it."""
    logged: list[Logged] = []

    def log(fx: str, name: str, value: Any, **options: Any) -> None:
        for key in ("sync_dist", "sync_dist_fn", "sync_dist_group", "enable_graph"):
            options.pop(key)
        levels = {key: options[key] for key in ("on_step", "on_epoch", "reduce_fx")}
        options["reduce_fx"] = _Metadata(fx, name, **levels).reduce_fx  # refuses those that Lightning can't do
        path = _path(module, name, value, options["metric_attribute"]) if isinstance(value, Metric) else None
        logged.append(Logged(fx, name, _forwarded(name, value, options) if path else value.detach(), path, options))

    results: Any = module.trainer._results
    if results is not None:  # in prediction nothing can be logged
        results.log = log  # hides the method of its class
    try:
        yield logged
    finally:
        if results is not None:
            del results.log


def _path(module: LightningModule, name: str, metric: Metric, attribute: str) -> str:
    """Where the other ranks find that metric."""
    found = {path: inner for path, inner in module.named_modules() if isinstance(inner, Metric)}
    if found.get(attribute) is not metric:
        raise ValueError(f"--exact: expected a metric that is a submodule; {name} logs one that is not")
    return attribute


def _forwarded(name: str, metric: Metric, options: Mapping[str, Any]) -> Tensor | None:
    """What the metric's forward gave, if it is logged."""
    value = metric._forward_cache if options["on_step"] else None
    if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"--exact: expected a metric whose forward gives one number; {name} logs another on each step")
    return None if value is None else value.detach().squeeze()


def log_again(module: LightningModule, logged: Logged, value: Tensor | None, batch_size: int) -> None:
    """Have Lightning log `value` as `logged` was to be."""
    results, connector = module.trainer._results, module.trainer._logger_connector
    assert results is not None
    if connector.should_reset_tensors(logged.hook):
        results.reset(metrics=False, fx=logged.hook)
    found: Any = None if value is None else value.to(module.device)
    if logged.metric is not None:
        metric = module.get_submodule(logged.metric)
        metric._forward_cache = found  # where Lightning looks for a step's value
        found = metric
    results.log(logged.hook, logged.name, found, **logged.options | {"batch_size": batch_size})
    connector._current_fx = logged.hook


class ShardLogger:
    """A LightningModule that is heard for each shard of a batch, and speaks of the whole batch once."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.heard: Any = None  # what was logged for the last shard; None before the first

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a shard."""
        with caught(self.module) as logged, collectives.refused("training_step", self.module.trainer.strategy):
            output = self.module.training_step(batch, *args, **kwargs)
        if output is None:
            raise ValueError("--exact: expected a training_step that returns a loss for every shard, not None")
        if self.heard is not None:
            _check_same(_layout(self.heard), _layout(logged))
        self.heard = logged
        return output["loss"] if isinstance(output, Mapping) else output

    def values(self) -> list[Tensor]:
        """The values of that shard, each followed by its weight where the module has said it."""
        numbers: list[Any] = []
        for logged in self.heard:
            if logged.value is not None:
                numbers += [logged.value, *([] if logged.batch_size is None else [logged.batch_size])]
        return [torch.as_tensor(x, dtype=torch.float64, device=self.module.device) for x in numbers]

    def agree(self, first: list[Logged] | None = None) -> None:
        """Raise ValueError where ranks have heard other names; one without a shard takes the `first` rank's."""
        self.heard = first if self.heard is None else self.heard
        layout = _layout(self.heard)
        code = torch.tensor(zlib.crc32(repr(layout).encode()), device=self.module.device)
        if len(replicas.all_gather(code).unique()) > 1:
            layouts: list[Any] = [None] * replicas.count()
            dist.all_gather_object(layouts, layout, group=replicas.group())
            for other in layouts:
                _check_same(layouts[0], other)

    def speak(self, table: Tensor, sizes: Sequence[int]) -> Iterable[nn.Parameter]:
        """Log the global batch; returns the parameters that are to take no step.

        Args:
            table: (shards, values), each shard's `values()`.
            sizes: rows of each shard.
        """
        there = [number for number, size in enumerate(sizes) if size]
        columns = iter(table[there].T.tolist())
        sizes = [sizes[number] for number in there]
        for logged in self.heard:
            value, weights = None, sizes
            if logged.value is not None:
                values = next(columns)
                weights = sizes if logged.batch_size is None else next(columns)
                value = logged.combined(values, weights)
            log_again(self.module, logged, value, int(sum(weights)))
        return []


def _layout(heard: Iterable[Logged]) -> list[tuple[str, bool, bool]]:
    """What has to be the same for all shards, so that their values can be put in one table."""
    return [(logged.name, logged.value is None, logged.batch_size is None) for logged in heard]


def _check_same(one: list[tuple], other: list[tuple]) -> None:
    if one != other:
        names = [", ".join(name for name, *_ in layout) or "nothing" for layout in (one, other)]
        raise ValueError(f"--exact: expected each shard to log the same; one logs {names[0]}, another {names[1]}")


class StatefulShardLogger(ShardLogger):
    """One that has a `shard_step` and an `on_global_batch`."""

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a shard."""
        with collectives.refused("shard_step", self.module.trainer.strategy):
            loss, values = self.module.shard_step(batch)  # type: ignore[operator]
        self.heard = {name: value.detach().double().mean() for name, value in values.items()}
        return loss

    def values(self) -> list[Tensor]:
        """The values of that shard: means over its rows."""
        return [value.to(self.module.device) for value in self.heard.values()]

    def agree(self, first: Any = None) -> None:
        """Take the first rank's names where this rank has no shard."""
        self.heard = first if self.heard is None else self.heard

    def speak(self, table: Tensor, sizes: Sequence[int]) -> Iterable[nn.Parameter]:
        """Let it act on the global batch."""
        means = dict(zip(self.heard, mean_over_rows(table, sizes).tolist(), strict=True))
        return self.module.on_global_batch(means, sum(sizes))  # type: ignore[operator]


def shard_logger_of(module: LightningModule) -> ShardLogger:
    """What hears a module."""
    return StatefulShardLogger(module) if hasattr(module, "shard_step") else ShardLogger(module)


class Record(NamedTuple):
    """What was logged in a batch of an evaluation, with the rows that each value stands for."""

    batch: int
    logged: list[tuple[Logged, int]]


def record(number: int, batch: Any, logged: Iterable[Logged]) -> Record:
    """That batch's; values go to the CPU, as they are sent to other ranks."""
    known = [(one._replace(value=one.value if one.value is None else one.value.cpu()), one) for one in logged]
    return Record(number, [(sent, _rows(batch, one)) for sent, one in known])


def _rows(batch: Any, logged: Logged) -> int:
    """The rows that a value stands for, as Lightning counts them."""
    if logged.batch_size is not None:
        return int(logged.batch_size)
    wanted = logged.metric is None and logged.is_mean and logged.options["on_epoch"]
    return extract_batch_size(batch) if wanted else 1


def replay(trainer: Trainer, records: Iterable[Record], seen: int) -> None:
    """Have Lightning log what was logged in a loader's batches, in their order, as one device does.

    Args:
        trainer: which has just come to the end of that loader.
        records: of all its batches.
        seen: batches of that loader in evaluations before this one, which a logger counts as steps.
    """
    connector, results = trainer._logger_connector, trainer._results
    assert results is not None
    connector.epoch_end_reached()  # the next batch is the first
    for step, (_, logged) in enumerate(sorted(records, key=lambda found: found.batch), start=seen):
        connector.on_batch_start(None, results.dataloader_idx)
        for one, rows in logged:
            log_again(trainer.lightning_module, one, one.value, rows)
        connector.on_batch_end()
        if not trainer.sanity_checking:
            connector.update_eval_step_metrics(step)
