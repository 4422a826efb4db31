"""Evaluation and prediction under `exact`: whole batches are distributed round-robin."""

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torchmetrics import Metric

from apprentice import keyed, replicas
from strategies.base.data_parallel import DataParallel
from strategies.base.shared_replica import SYNCHRONISE
from strategies.exact.collectives import refuse_collectives
from strategies.exact.shard_logging import LogCall, capture_logs

# An evaluation batch's number and what it logged, with the number of rows that each value stands for.
BatchLogs = tuple[int, list[tuple[LogCall, int]]]
SPARE = np.random.MT19937(0)  # numpy's generator inside `_seeded`: to copy the state of its own would take longer


class RoundRobinEvaluation(DataParallel):
    """Evaluates batch i on replica i % replicas; all ranks log the same values."""

    exact: int | None  # number of shards; None for plain data parallelism
    _evaluated = 0  # batches, of all ranks
    _logs: list[BatchLogs]  # of this rank
    _undo: ExitStack  # for teardown

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica of the module, and the number of replicas."""
        return self.global_rank, self._num_ranks

    @contextmanager
    def _seeded(self, *numbers: int) -> Iterator[None]:
        """Seed torch, numpy and Python with the run's seed and these numbers; restore their states afterwards."""
        seed = getattr(self.lightning_module, "seed", None) or int(os.environ.get("PL_GLOBAL_SEED", "0"))
        key = keyed.fold_in(seed, *numbers)
        cuda = self.root_device.type == "cuda"
        python_state, numpy_generator = random.getstate(), get_bit_generator()
        set_bit_generator(SPARE)
        try:
            with torch.random.fork_rng([self.root_device] if cuda else []):
                torch.default_generator.manual_seed(key)
                if cuda:  # torch.manual_seed would note a call stack for an unused GPU
                    torch.cuda.manual_seed(key)
                np.random.seed(key)  # noqa: NPY002 - others' modules draw from it
                random.seed(key)
                yield
        finally:
            set_bit_generator(numpy_generator)
            random.setstate(python_state)

    def _is_mine(self) -> bool:
        rank, replicas = self.replica
        return self._evaluated % replicas == rank

    def on_validation_start(self) -> None:
        """Start with the first rank."""
        self._evaluated, self._logs = 0, []

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate a batch, if it is this rank's."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch, if it is this rank's."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch."""
        if self.exact is None:
            return super().predict_step(*args, **kwargs)
        with self._isolated("predict_step"):
            return super().predict_step(*args, **kwargs)

    def _evaluate(self, step: Callable, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.exact is None:
            return step(batch, *args, **kwargs)
        mine, self._evaluated = self._is_mine(), self._evaluated + 1
        if not mine:
            return None
        with capture_logs(self._module) as calls, self._isolated(step.__name__):
            output = step(batch, *args, **kwargs)
        # Values go to the CPU, as they are sent to other ranks.
        on_cpu = [(c._replace(value=c.value if c.value is None else c.value.cpu()), _rows(batch, c)) for c in calls]
        self._logs.append((self._evaluated, on_cpu))
        return output

    @contextmanager
    def _isolated(self, step: str) -> Iterator[None]:
        """Inside, random numbers depend on the epoch and the number of the batch; collectives are refused."""
        with self._seeded(self._trainer.current_epoch, self._evaluated), refuse_collectives(step, self):
            yield

    def _replace_loops(self, trainer: Trainer) -> None:
        """Log the same values on all ranks, and predict each batch on one."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
        methods: list[tuple[Any, str, Callable]] = [(trainer.predict_loop, "_predict_step", self._predict_mine)]
        for loop, name, method in [*methods, *((x, "_store_dataloader_outputs", self._log_all_batches) for x in loops)]:
            setattr(loop, name, partial(method, loop, getattr(loop, name)))
            self._undo.callback(vars(loop).pop, name, None)

    def _log_all_batches(self, loop: Any, store_outputs: Callable) -> None:
        if self._evaluated <= self.replica[0]:  # this rank had no batch: its metrics would warn of that
            for metric in (m for m in self._module.modules() if isinstance(m, Metric)):
                metric._update_count += 1
        gathered: list[list[BatchLogs]] = [self._logs]
        if replicas.count() > 1:
            gathered = [[] for _ in range(replicas.count())]
            dist.all_gather_object(gathered, self._logs, group=replicas.group())
        self._logs = []
        _repeat(loop, sorted(chain.from_iterable(gathered), key=lambda logs: logs[0]))
        store_outputs()

    def _predict_mine(self, loop: Any, predict: Callable, *args: Any) -> None:
        if self._is_mine():
            predict(*args)
        self._evaluated += 1


def _rows(batch: Any, call: LogCall) -> int:
    """The number of rows that a value stands for, as Lightning counts them."""
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
