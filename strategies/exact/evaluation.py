"""Evaluation and prediction under `exact`: whole batches are distributed round-robin."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torchmetrics import Metric

from apprentice import replicas
from apprentice.contract import layout_of
from strategies.base.data_parallel import DataParallel
from strategies.base.shared_replica import SYNCHRONISE
from strategies.exact.isolation import refuse_collectives, seed_generators
from strategies.exact.shard_logging import LogCall, capture_logs

# An evaluation batch's number and what it logged, with the number of rows that each value stands for.
BatchLogs = tuple[int, list[tuple[LogCall, int]]]


class RoundRobin:
    """Evaluates batch i on replica i % replicas; all ranks log the same values."""

    def __init__(self, strategy: DataParallel) -> None:
        self.strategy = strategy
        self._count = 0  # batches that all ranks have evaluated
        self._logs: list[BatchLogs] = []  # of this rank

    def start(self) -> None:
        self._count, self._logs = 0, []

    def is_mine(self) -> bool:
        """Whether the next batch is this rank's."""
        rank, replicas = self.strategy.replica
        return self._count % replicas == rank

    def step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        is_mine, self._count = self.is_mine(), self._count + 1
        if not is_mine:
            return None
        with capture_logs(self.strategy._module) as calls, self.isolate(run.__name__):
            output = run(batch, *args, **kwargs)
        # Values go to the CPU, as they are sent to other ranks.
        on_cpu = [(c._replace(value=c.value if c.value is None else c.value.cpu()), _rows(batch, c)) for c in calls]
        self._logs.append((self._count, on_cpu))
        return output

    @contextmanager
    def isolate(self, step: str) -> Iterator[None]:
        """Inside, random numbers depend on the epoch and the number of the batch; collectives are refused."""
        device, layout = self.strategy.root_device, layout_of(self.strategy._module)
        seeded = seed_generators(device, layout, self.strategy._trainer.current_epoch, self._count)
        with seeded, refuse_collectives(step, self.strategy):
            yield

    def replace_loops(self, trainer: Trainer) -> None:
        """Log the same values on all ranks, and predict each batch on one, until the strategy's teardown."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        loop: Any = trainer.predict_loop
        self.strategy.replace(loop, "_predict_step", partial(self._predict_mine, loop._predict_step))
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            store_outputs = partial(self._log_all_batches, loop, loop._store_dataloader_outputs)
            self.strategy.replace(loop, "_store_dataloader_outputs", store_outputs)

    def _log_all_batches(self, loop: Any, store_outputs: Callable[[], None]) -> None:
        if self._count <= self.strategy.replica[0]:  # this rank had no batch: its metrics would warn of that
            for metric in (m for m in self.strategy._module.modules() if isinstance(m, Metric)):
                metric._update_count += 1
        logs: list[list[BatchLogs]] = [self._logs]  # of each rank
        if replicas.count() > 1:
            logs = [[] for _ in range(replicas.count())]
            dist.all_gather_object(logs, self._logs, group=replicas.group())
        self._logs = []
        _repeat(loop, sorted(chain.from_iterable(logs), key=itemgetter(0)))
        store_outputs()

    def _predict_mine(self, predict: Callable[..., None], *args: Any) -> None:
        if self.is_mine():
            predict(*args)
        self._count += 1


def _rows(batch: Any, call: LogCall) -> int:
    """Return the number of rows that a value stands for, as Lightning counts them."""
    if call.batch_size is not None:
        return int(call.batch_size)
    weighted = call.metric is None and call.is_mean and call.options["on_epoch"]
    return extract_batch_size(batch) if weighted else 1


def _repeat(loop: Any, batches: list[BatchLogs]) -> None:
    """Log what a loader's batches logged, as on one device; `loop` is at the loader's end."""
    trainer = loop.trainer
    connector, results = trainer._logger_connector, trainer._results
    before = loop._seen_batches_per_dataloader[results.dataloader_idx or 0] - len(batches)  # in earlier evaluations
    connector.epoch_end_reached()  # the next batch is the first
    for step, (_, calls) in enumerate(batches, start=before):
        connector.on_batch_start(None, results.dataloader_idx)
        for call, rows in calls:
            call.repeat(trainer.lightning_module, call.value, rows)
        connector.on_batch_end()
        if not trainer.sanity_checking:
            connector.update_eval_step_metrics(step)
