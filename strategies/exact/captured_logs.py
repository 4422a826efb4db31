"""Captures calls of `LightningModule.log` and repeats them later."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype, _Metadata
from torch import Tensor
from torchmetrics import Metric


class LogCall(NamedTuple):
    """A call of `LightningModule.log`, with Lightning's defaults filled in."""

    hook: str  # that called it, such as `training_step`
    name: str  # without Lightning's suffixes, such as `_epoch`
    value: Tensor | None  # scalar; for a metric object its forward value, None if that is not logged
    metric: str | None  # path of a metric object in the module, by which other ranks find theirs
    options: dict[str, Any]  # the other arguments

    @property
    def batch_size(self) -> int | None:
        """The `batch_size` that the module passed."""
        return self.options["batch_size"]

    @property
    def is_mean(self) -> bool:
        """Whether values are averaged, weighted by their rows."""
        return self.metric is not None or self.options["reduce_fx"] is torch.mean

    def reduced(self, values: Sequence[float], weights: Sequence[float]) -> Tensor:
        """The values of all shards, reduced by `reduce_fx`; a mean is weighted."""
        if self.is_mean:
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            found = torch.tensor(total, dtype=torch.float64) / sum(weights)
        else:
            found = self.options["reduce_fx"](torch.tensor(values, dtype=torch.float64))
        assert self.value is not None
        kept = self.value.dtype in {torch.float32, torch.float64}
        return found.to(self.value.dtype if kept else _get_default_dtype())

    def repeat(self, module: LightningModule, value: Tensor | None, batch_size: int) -> None:
        """Log `value` in place of the call's own."""
        results, connector = module.trainer._results, module.trainer._logger_connector
        assert results is not None
        if connector.should_reset_tensors(self.hook):
            results.reset(metrics=False, fx=self.hook)
        found: Any = None if value is None else value.to(module.device)
        if self.metric is not None:
            metric = module.get_submodule(self.metric)
            metric._forward_cache = found  # where Lightning looks for a step's value
            found = metric
        results.log(self.hook, self.name, found, **self.options | {"batch_size": batch_size})
        connector._current_fx = self.hook


@contextmanager
def capture_logs(module: LightningModule) -> Iterator[list[LogCall]]:
    """Inside, the module's logs are collected and don't reach Lightning's results; Lightning still checks them."""
    calls: list[LogCall] = []

    def log(fx: str, name: str, value: Any, **options: Any) -> None:
        for key in ("sync_dist", "sync_dist_fn", "sync_dist_group", "enable_graph"):
            options.pop(key)
        levels = {key: options[key] for key in ("on_step", "on_epoch", "reduce_fx")}
        options["reduce_fx"] = _Metadata(fx, name, **levels).reduce_fx  # raises for those that Lightning refuses
        path = options["metric_attribute"] if isinstance(value, Metric) else None
        value = _forward_value(module, name, value, options) if isinstance(value, Metric) else value.detach()
        calls.append(LogCall(fx, name, value, path, options))

    results: Any = module.trainer._results
    if results is None:  # in prediction nothing can be logged
        yield calls
        return
    results.log = log  # hides the method of its class
    try:
        yield calls
    finally:
        del results.log


def _forward_value(module: LightningModule, name: str, metric: Metric, options: Mapping[str, Any]) -> Tensor | None:
    if dict(module.named_modules()).get(options["metric_attribute"]) is not metric:
        raise ValueError(f"--exact: expected a metric that is a submodule; {name} logs one that is not")
    value = metric._forward_cache if options["on_step"] else None
    if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"--exact: expected a metric whose forward gives one number; {name} logs another on each step")
    return None if value is None else value.detach().squeeze()
