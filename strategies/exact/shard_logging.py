"""Captures `self.log` per shard or evaluation batch, and logs one mean per global batch."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from apprentice import replicas
from apprentice.contract import HasShardStep
from strategies.base.data_parallel import DataParallel
from strategies.base.private import LogMetadata, default_dtype
from strategies.exact.isolation import refuse_collectives
from strategies.exact.shards import mean_over_rows

Layout = list[tuple[str, bool, bool]]  # for each call: its name, whether it logs no value, and no batch size


class LogCall(NamedTuple):
    """A call of `LightningModule.log`, with Lightning's defaults filled in."""

    hook: str  # that called it, such as `training_step`
    name: str  # without Lightning's suffixes, such as `_epoch`
    value: Tensor | None  # scalar; for a metric object its forward value, None if that is not logged
    metric: str | None  # path of a metric object in the module, by which other ranks find theirs
    batch_size: int | None  # that the module passed
    options: dict[str, Any]  # the other arguments

    @property
    def is_mean(self) -> bool:
        """Whether values are averaged, weighted by their rows."""
        return self.metric is not None or self.options["reduce_fx"] is torch.mean

    def reduce(self, values: Sequence[float], weights: Sequence[float]) -> Tensor:
        """Reduce the values of all shards by `reduce_fx`; a mean is weighted."""
        if self.is_mean:
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            result = torch.tensor(total, dtype=torch.float64) / sum(weights)
        else:
            result = self.options["reduce_fx"](torch.tensor(values, dtype=torch.float64))
        assert self.value is not None
        keeps_dtype = self.value.dtype in {torch.float32, torch.float64}
        return result.to(self.value.dtype if keeps_dtype else default_dtype())

    def repeat(self, module: LightningModule, value: Tensor | None, batch_size: int) -> None:
        """Log `value` in place of the value of this call."""
        results, connector = module.trainer._results, module.trainer._logger_connector
        assert results is not None
        if connector.should_reset_tensors(self.hook):
            results.reset(metrics=False, fx=self.hook)
        logged: Any = None if value is None else value.to(module.device)
        if self.metric is not None:
            metric = module.get_submodule(self.metric)
            metric._forward_cache, logged = logged, metric  # where Lightning looks for a step's value
        results.log(self.hook, self.name, logged, **self.options | {"batch_size": batch_size})
        connector._current_fx = self.hook


@contextmanager
def capture_logs(module: LightningModule) -> Iterator[list[LogCall]]:
    """Collect the module's logs inside, instead of passing them to Lightning's results; Lightning checks them."""
    calls: list[LogCall] = []

    def log(fx: str, name: str, value: Any, **options: Any) -> None:
        for key in ("sync_dist", "sync_dist_fn", "sync_dist_group", "enable_graph"):
            options.pop(key)
        levels = {key: options[key] for key in ("on_step", "on_epoch", "reduce_fx")}
        options["reduce_fx"] = LogMetadata(fx, name, **levels).reduce_fx  # raises for those that Lightning refuses
        path = options["metric_attribute"] if isinstance(value, Metric) else None
        value = _forward_value(module, name, value, options) if isinstance(value, Metric) else value.detach()
        calls.append(LogCall(fx, name, value, path, options["batch_size"], options))

    results: Any = module.trainer._results
    results.log = log  # hides the method of its class
    try:
        yield calls
    finally:
        del results.log


def _forward_value(module: LightningModule, name: str, metric: Metric, options: Mapping[str, Any]) -> Tensor | None:
    strategy: Any = module.trainer.strategy
    if dict(module.named_modules()).get(options["metric_attribute"]) is not metric:
        raise strategy._fault(f"a metric that is a submodule; {name} logs one that is not")
    value = metric._forward_cache if options["on_step"] else None
    if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
        raise strategy._fault(f"a metric whose forward gives one number; {name} logs another on each step")
    return None if value is None else value.detach().squeeze()


class ShardLogger:
    """Calls a module's `training_step` per shard, and logs the global batch once."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.logged: Any = None  # by the last shard
        self.strategy: Any = module.trainer.strategy

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a shard."""
        with capture_logs(self.module) as logged, refuse_collectives("training_step", self.strategy):
            output = self.module.training_step(batch, *args, **kwargs)
        if output is None:
            raise self.strategy._fault("a training_step that returns a loss for every shard, not None")
        if self.logged is not None:
            _check_same(self.strategy, _layout(self.logged), _layout(logged))
        self.logged = logged
        return output["loss"] if isinstance(output, Mapping) else output

    def values(self) -> list[Tensor]:
        """Return the values that the last shard logged, each followed by its `batch_size` if the module passed one."""
        calls: list[LogCall] = [call for call in self.logged if call.value is not None]
        numbers = [number for call in calls for number in (call.value, call.batch_size) if number is not None]
        return [torch.as_tensor(x, dtype=torch.float64, device=self.module.device) for x in numbers]

    def share_layout(self, some_empty: bool) -> None:
        """Check that all ranks logged the same names; ranks without a row take rank zero's, if `some_empty`."""
        if some_empty:
            first = self.strategy.broadcast(move_data_to_device(self.logged, "cpu"))  # arrives on the device it was on
            self.logged = first if self.logged is None else self.logged
        self._check_ranks()

    def _check_ranks(self) -> None:
        layout = _layout(self.logged)
        code = torch.tensor(zlib.crc32(repr(layout).encode()), device=self.module.device)
        if len(replicas.all_gather(code).unique()) > 1:
            layouts: list[Any] = [None] * replicas.count()
            dist.all_gather_object(layouts, layout, group=replicas.group())
            for other in layouts:
                _check_same(self.strategy, layouts[0], other)

    def log_batch(self, table: Tensor, sizes: Sequence[int]) -> Iterable[nn.Parameter]:
        """Log the global batch, from each shard's `values()` (shards, values); returns parameters to freeze."""
        filled = [number for number, size in enumerate(sizes) if size]
        columns = iter(table[filled].T.tolist())
        sizes = [sizes[number] for number in filled]
        for call in self.logged:
            value, weights = None, sizes
            if call.value is not None:
                values = next(columns)
                weights = sizes if call.batch_size is None else next(columns)
                value = call.reduce(values, weights)
            call.repeat(self.module, value, int(sum(weights)))
        return []


def _layout(logged: Iterable[LogCall]) -> Layout:
    return [(call.name, call.value is None, call.batch_size is None) for call in logged]


def _check_same(strategy: DataParallel, one: Layout, other: Layout) -> None:
    if one != other:
        names = [", ".join(name for name, *_ in layout) or "nothing" for layout in (one, other)]
        raise strategy._fault(f"each shard to log the same; one logs {names[0]}, another {names[1]}")


class StatefulShardLogger(ShardLogger):
    """Calls `shard_step` per shard and `on_global_batch` per global batch."""

    def __init__(self, module: LightningModule, steps: HasShardStep) -> None:
        super().__init__(module)
        self.steps = steps  # the module's

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        with refuse_collectives("shard_step", self.strategy):
            loss, values = self.steps.shard_step(batch)
        self.logged = {name: value.detach().double().mean() for name, value in values.items()}
        return loss

    def values(self) -> list[Tensor]:
        """Return the last shard's values, averaged over its rows."""
        return [value.to(self.module.device) for value in self.logged.values()]

    def _check_ranks(self) -> None:
        pass  # the module's contract

    def log_batch(self, table: Tensor, sizes: Sequence[int]) -> Iterable[nn.Parameter]:
        """Pass the means over the global batch to the module."""
        means = dict(zip(self.logged, mean_over_rows(table, sizes).tolist(), strict=True))
        return self.steps.on_global_batch(means, sum(sizes))


def shard_logger_of(module: LightningModule) -> ShardLogger:
    """Return the logger for a module."""
    return StatefulShardLogger(module, module) if isinstance(module, HasShardStep) else ShardLogger(module)
