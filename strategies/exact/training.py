"""A training step under `exact`: shard by shard."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from apprentice import replicas
from apprentice.contract import HasShardStep, ModuleLayout, Preparation, layout_of
from apprentice.errors import BadInput
from apprentice.relations import ShardedRelations
from strategies.base.data_parallel import DataParallel
from strategies.base.gradients import attach_gradients, set_aside
from strategies.base.private import NormBase
from strategies.exact.fixed_point import FixedPointSum
from strategies.exact.isolation import seed_generators
from strategies.exact.shard_logging import ShardLogger, shard_logger_of
from strategies.exact.shards import Shard, bounds, fewest_rows, mean_over_rows, part, rows, spans


class NotFiniteError(BadInput, OverflowError):
    """Gradients that are not finite have no exact sum."""


class RunningStatistics:
    """Running statistics of normalisation layers in training: each shard starts from the same, results are merged."""

    def __init__(self, *modules: nn.Module) -> None:
        layers = [m for module in modules for m in module.modules() if isinstance(m, NormBase) and m.training]
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._start = [buffer.clone() for buffer in self._buffers]
        merged = set(self._buffers)
        self._others = {
            name: (buffer, buffer._version)
            for module in modules
            for name, buffer in module.named_buffers()
            if not buffer.is_inference() and buffer not in merged
        }
        self.size = sum(buffer.numel() for buffer in self._buffers)

    def take(self) -> list[Tensor]:
        """Return the statistics after a shard, float64 and flat, and reset the buffers to their first values.

        BadInput if another buffer has changed, which can't be merged.
        """
        if changed := [name for name, (buffer, version) in self._others.items() if buffer._version != version]:
            expected = "training steps that change no buffer but BatchNorm's"
            raise BadInput("", "training_step", f"{expected}; {changed[0]} has changed")
        statistics = [buffer.to(torch.float64, copy=True).flatten() for buffer in self._buffers]
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.data.copy_(start)  # `data`: autograd has saved the buffer and refuses changes that it sees
        return statistics

    def put(self, merged: Tensor) -> None:
        """Set the buffers to merged values, (size,) float64."""
        pieces = merged.split([buffer.numel() for buffer in self._buffers])
        for buffer, values in zip(self._buffers, pieces, strict=True):
            buffer.copy_((values if buffer.is_floating_point() else values.round()).view_as(buffer))


class ShardedTraining:
    """Computes this rank's shards of a batch one by one and sums their gradients without rounding."""

    def __init__(self, strategy: DataParallel, shards: int) -> None:
        self.strategy, self.shards = strategy, shards
        self._sums: list[FixedPointSum] = []
        self._global_rows = 0
        self._spans: list[tuple[int, int]] = []  # rows of all shards
        self._mine = range(0)  # numbers of this rank's shards
        self._relations = ShardedRelations(0)  # of the global batch
        self._layout = ModuleLayout()  # of the module in this step

    def clear(self) -> None:
        self._sums = []

    def cut(self, batch: Any) -> Any:
        """Return the rows of this rank's shards of a global batch."""
        self._layout, self._global_rows = layout_of(self.module), rows(batch)
        self._spans = spans(self._global_rows, self.shards, fewest_rows(self.module))
        rank, replicas = self.strategy.replica
        self._mine = range(*bounds(self.shards, replicas)[rank : rank + 2])
        start, stop = self._spans[self._mine[0]][0], self._spans[self._mine[-1]][1]
        if start == stop and self._layout.relates_rows:
            start, stop = self._spans[0]  # to make the others' collectives
        return part(batch, start, stop)

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._layout = layout_of(self.module)  # a hook may have changed it
        groups = self._parameter_groups()
        current = [[*map(id, total.parameters)] for total in self._sums]
        if current != [[*map(id, parameters.values())] for parameters in groups]:
            self._sums = [FixedPointSum(parameters, self.shards) for parameters in groups]
        for total in self._sums:
            total.clear()
        self._relations = ShardedRelations(self._global_rows)
        if self._layout.preparation is not None:
            self._prepare(self._layout.preparation, batch)
        if self._layout.relates_rows:  # rows of the global batch: these are gathered in a first pass over the shards
            self._collect(batch, *args, **kwargs)
            with self._step_context():
                self._relations.compute()
        logger, statistics = shard_logger_of(self.module), self._statistics()
        with set_aside(self.trainable):
            table = self._forward_and_backward(logger, statistics, batch, *args, **kwargs)
        tables = [total.reduce(table) for total in self._sums] or [replicas.all_reduce_sum(table)]
        sizes = [stop - start for start, stop in self._spans]
        means = mean_over_rows(tables[0], sizes)
        end = len(means) - statistics.size
        statistics.put(means[end:])
        with self._step_context():  # gives logged numbers their type
            frozen = logger.log_batch(tables[0][:, 1:end], sizes)
        return attach_gradients(means[0].to(self.module.dtype), self._gradients(set(frozen)))

    @property
    def module(self) -> LightningModule:
        return self.strategy._module

    def _step_context(self) -> AbstractContextManager[None]:
        return self.strategy.precision_plugin.train_step_context()

    def _shards_of(self, batch: Any) -> list[Shard]:
        """This rank's shards that have any rows."""
        first = self._spans[self._mine[0]][0]
        mine = ((number, *self._spans[number]) for number in self._mine)
        return [Shard(n, a, b, part(batch, a - first, b - first)) for n, a, b in mine if a < b]

    def _collect(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Compute this rank's shards for what they relate; a rank that has none computes the first."""
        logger, statistics, mine = shard_logger_of(self.module), self._statistics(), self._shards_of(batch)
        for shard in mine or [Shard(0, *self._spans[0], batch)]:
            # With gradients, as kernels may round differently without.
            with self._isolate(shard, is_mine=bool(mine)), self._step_context():
                logger.step(shard.batch, *args, **kwargs)
            statistics.take()

    def _prepare(self, preparation: Preparation, batch: Any) -> None:
        """Prepare the step for this rank's shards, or for the one that it computes in another's place."""
        mine = self._shards_of(batch)
        others = [Shard(0, *self._spans[0], batch)] if self._layout.relates_rows and not mine else []
        for shard in mine or others:
            with self._isolate(shard, is_mine=bool(mine)), self._step_context():
                preparation.prepare_rows(shard.batch, counted=bool(mine))
        preparation.count_prepared()

    def _parameter_groups(self) -> list[dict[str, nn.Parameter]]:
        """Return the trainable parameters by name, in groups whose gradients are complete at the same time."""
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        return [parameters] if parameters else []

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return this rank's trainable parameters by name."""
        return {name: p for parameters in self._parameter_groups() for name, p in parameters.items()}

    def _gradients(self, frozen: set[nn.Parameter]) -> dict[nn.Parameter, Tensor | None]:
        """Return the global batch's gradients, None for parameters that have none or are frozen."""
        gradients: dict[nn.Parameter, Tensor | None] = {}
        for total in self._sums:
            parameters = dict(zip(total.names, total.parameters, strict=True))
            if flawed := [name for name in total.flawed_names() if parameters[name] not in frozen]:
                expected = f"finite gradients; that of {', '.join(flawed[:3])} is not"
                raise NotFiniteError("exact", self.shards, expected)
            gradients |= zip(total.parameters, total.divide(self._weight(self._global_rows)), strict=True)
        return {p: None if p in frozen else gradient for p, gradient in gradients.items()}

    def _statistics(self) -> RunningStatistics:
        return RunningStatistics(self.module)

    def _forward_and_backward(
        self, logger: ShardLogger, statistics: RunningStatistics, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """(shards, k) of each shard its loss, logged values and running statistics; zeros for other ranks' shards."""
        results: dict[int, Tensor] = {}
        for shard in self._shards_of(batch):
            with self._isolate(shard):
                with self._step_context():
                    loss = logger.step(shard.batch, *args, **kwargs)
                (loss * self._weight(shard.rows)).backward()
            for total in self._sums:
                total.add()
            results[shard.number] = shard_values(loss, logger, statistics.take())
        return self._table(logger, results, statistics.size)

    def _table(self, logger: ShardLogger, results: dict[int, Tensor], statistics: int) -> Tensor:
        logger.share_layout(some_empty=any(start == stop for start, stop in self._spans))
        width = 1 + len(logger.values()) + statistics
        table = torch.zeros(self.shards, width, dtype=torch.float64, device=self.strategy.root_device)
        for number, values in results.items():
            table[number] = values
        return table

    @contextmanager
    def _isolate(self, shard: Shard, is_mine: bool = True) -> Iterator[None]:
        trainer = self.strategy._trainer
        numbers = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, shard.number
        random = seed_generators(self.strategy.root_device, self._layout, *numbers)
        related = self._relations.shard(is_mine)
        with random, related, replicas.shard(shard.start), self._name_shard(shard):
            yield

    @contextmanager
    def _name_shard(self, shard: Shard) -> Iterator[None]:
        """Name the shard where torch's BatchNorm refuses a single row."""
        try:
            yield
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            rows = f"shard {shard.number} of {self.shards} has {shard.rows} of the batch's {self._global_rows}"
            raise self.strategy._fault(f"batches of two rows or more for BatchNorm; {rows}") from error

    def _weight(self, rows: int) -> float:
        """Return the weight of a mean over some rows: exact, and at most 1, so that no shard overflows alone."""
        return rows / 2.0 ** (self._global_rows - 1).bit_length()


def shard_values(loss: Tensor, logger: ShardLogger, statistics: list[Tensor]) -> Tensor:
    """Return (k,), a shard's loss, logged values and running statistics."""
    return torch.cat([torch.stack([loss.detach().double(), *logger.values()]), *statistics])


def try_step(strategy: DataParallel, module: LightningModule, batch: Any) -> None:
    """Compute a shard of a module with a `shard_step`, outside of a fit, and check what each shard is checked for."""
    assert isinstance(module, HasShardStep)
    layout = layout_of(module)
    seeded = seed_generators(strategy.root_device, layout, 0)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    relations = ShardedRelations(len(batch.rows))
    with set_aside(lambda: parameters), seeded, replicas.shard(0):
        if layout.relates_rows:  # what relates rows may change buffers, once a global batch
            with relations.shard():
                module.shard_step(batch)
            relations.compute()
        statistics = RunningStatistics(module)
        with relations.shard():
            loss, _ = module.shard_step(batch)
        loss.backward()
        FixedPointSum(parameters, strategy.exact or 1).add()
        statistics.take()
