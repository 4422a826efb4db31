"""The exact mode: the same float32 bits on any number of devices.

Float addition depends on its order, and a kernel's bits on the shape it is given. So a global batch is cut into N
shards whose bounds don't depend on the number of devices. Each is computed by itself on some rank, and what is added up
over shards is added without rounding (gradients) or in the order of the shards (logged values, BatchNorm's running
statistics). Evaluation and prediction deal whole batches to the ranks.
"""

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor, nn
from torchmetrics import Metric

from apprentice import keyed, replicas
from strategies.base.data_parallel import DataParallel
from strategies.base.gradients import handed_over, set_aside
from strategies.base.shared_replica import SYNCHRONISE
from strategies.exact import collectives
from strategies.exact.fixed_point import FixedPointSum
from strategies.exact.shard_logging import Record, ShardLogger, caught, record, replay, shard_logger_of
from strategies.exact.shards import RunningStatistics, bounds, fewest_rows, mean_over_rows, part, rows, spans


class Shard(NamedTuple):
    """Rows `start` to `stop` of a global batch, its shard `number`."""

    number: int
    start: int
    stop: int
    batch: Any

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Exact(DataParallel):
    """Data parallelism that can be exact.

    Any LightningModule whose loss is a mean over the rows of its batch can be trained like this; its `training_step` is
    called for each shard, so it must log the same names for each, keep no state between calls and call no collective;
    what it logs comes out under the names, and by the `reduce_fx`, of Lightning on one device. One that has to act
    on a global batch's values offers `shard_step(batch) -> (loss, {name: (b,) values})`, which is called for each shard
    instead, and `on_global_batch(means, count) -> parameters that take no step`, which is called once.

    BatchNorm takes its statistics from a shard. While a layer does, a shard has 8 rows at least, or the whole batch;
    the other shards are empty.

    Args:
        exact: number of shards of a batch, and the largest number of devices; None for plain data parallelism.
        **kwargs: DataParallel's.

    Raises:
        ValueError: more devices than shards, or a module that can't be exact.
    """

    def __init__(self, *, exact: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if exact is not None and exact < 1:
            raise ValueError(f"exact {exact}: expected a number of shards, at least 1")
        self.exact = exact
        self._sums: list[FixedPointSum] = []
        self._global_rows = self._evaluated = 0
        self._spans: list[tuple[int, int]] = []
        self._records: list[Record] = []
        self._shared: list[tuple[Any, str]] = []  # methods of loops that are replaced
        self._settings: tuple[int, bool] | None = None

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica of the module, and how many there are."""
        return self.global_rank, self.num_processes * self.num_nodes

    # One device needs no process group

    @property
    def _alone(self) -> bool:
        return self.exact is not None and self.num_processes * self.num_nodes == 1

    def _check_devices(self) -> None:
        super()._check_devices()
        replicas = self.replica[1]
        if self.exact is not None and replicas > self.exact:
            raise ValueError(f"exact {self.exact}: expected at least {replicas}, the number of devices")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._alone:
            self._launcher = None

    def setup_distributed(self) -> None:
        """Join the process group, where there is anyone to join; torch's generators start from the seed in any case."""
        if self._alone:
            reset_seed()
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def setup_environment(self) -> None:
        """Compute with one thread and deterministic kernels: the number of threads changes the bits."""
        super().setup_environment()
        if self.exact is None:
            return
        self._settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        torch.set_num_threads(1)
        if self.root_device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def teardown(self) -> None:
        """Give threads and kernels back."""
        super().teardown()
        self._sums = []
        for loop, name in self._shared:
            vars(loop).pop(name, None)
        self._shared = []
        if self._settings is not None:
            torch.set_num_threads(self._settings[0])
            torch.use_deterministic_algorithms(self._settings[1])
            self._settings = None

    def setup(self, trainer: Trainer) -> None:
        """Set the module up; in the exact mode it is not wrapped, as its gradients are not averaged as floats."""
        if self.exact is not None:
            assert self.lightning_module is not None
            self.check_module(self.lightning_module)
            self._share_evaluation(trainer)
            self._broadcast_random_states()
        if self._alone:
            Strategy.setup(self, trainer)
        else:
            super().setup(trainer)

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError where the module can't be exact, if it has to be."""
        if self.exact is None:
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
            raise ValueError(f"exact {self.exact}: expected automatic optimization and Lightning's own backward")
        if scaler is not None and scaler.is_enabled():
            raise ValueError(f"exact {self.exact}: expected another precision than 16-mixed, which scales the loss")

    def configure_ddp(self) -> None:
        """Wrap the module; where there is no wrapper, begin with rank zero's states."""
        if self.exact is None:
            super().configure_ddp()
        else:
            assert self.lightning_module is not None
            _sync_module_states(self.lightning_module)

    def _setup_model(self, model: nn.Module) -> Any:
        return super()._setup_model(model) if self.exact is None else model

    # Batches

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas and rank; in the exact mode every rank's loader yields the global batches."""
        rank, replicas = (0, 1) if self.exact is not None else self.replica
        return {"num_replicas": replicas, "rank": rank}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Cut out the rows that this rank computes, and move them."""
        if self.exact is not None:
            assert self.lightning_module is not None
            if self.lightning_module.trainer.training:
                self._global_rows = rows(batch)
                self._spans = spans(self._global_rows, self.exact, fewest_rows(self.lightning_module))
                shards = self._shards()
                batch = part(batch, shards[0][0], shards[-1][1])
            elif not self._is_mine():
                return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def _shards(self) -> list[tuple[int, int]]:
        """First row and last row + 1 in the global batch of each of this rank's shards; some may be empty."""
        return [self._spans[i] for i in self._numbers()]

    def _numbers(self) -> range:
        """The numbers of this rank's shards."""
        rank, replicas = self.replica
        return range(*bounds(self.exact or 1, replicas)[rank : rank + 2])

    # Training

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of the global batch; its backward hands over the sum of the shards' gradients."""
        if self.exact is None:
            return super().training_step(batch, *args, **kwargs)
        assert self.lightning_module is not None
        module = self.lightning_module
        parts = self._parts()
        known = [[*map(id, total.parameters)] for total in self._sums]
        if known != [[*map(id, parameters.values())] for parameters in parts]:
            self._sums = [FixedPointSum(parameters, self.exact) for parameters in parts]
        for total in self._sums:
            total.clear()
        speaker = shard_logger_of(module)
        statistics = self._statistics(module)
        with set_aside(self._trainable):
            table = self._forward_and_backward(speaker, statistics, batch, *args, **kwargs)
        sizes = [stop - start for start, stop in self._spans]
        tables = [total.reduce(table) for total in self._sums] or [replicas.all_reduce_sum(table)]
        means = mean_over_rows(tables[0], sizes)
        statistics.put(means[len(means) - statistics.size :])
        with self.precision_plugin.train_step_context():  # a number that is logged takes its type from here
            excused = speaker.speak(tables[0][:, 1 : len(means) - statistics.size], sizes)
        gradients: dict[nn.Parameter, Tensor | None] = {}
        for total in self._sums:
            gradients |= self._gradients(total, {id(p) for p in excused})
        return handed_over(means[0].to(module.dtype), gradients)

    def _parts(self) -> list[dict[str, nn.Parameter]]:
        """The trainable parameters by name, those together whose gradients come together."""
        assert self.lightning_module is not None
        trainable = {name: p for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        return [trainable] if trainable else []

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for parameters in self._parts() for name, p in parameters.items()}

    def _statistics(self, module: LightningModule) -> RunningStatistics:
        return RunningStatistics(module)

    def _forward_and_backward(
        self, speaker: ShardLogger, statistics: RunningStatistics, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute this rank's shards; (shards, k) of each its loss, values and running statistics, others' are 0."""
        found: dict[int, Tensor] = {}
        for shard in self._cut(batch):
            with self._alone_with(shard):
                with self.precision_plugin.train_step_context():
                    loss = speaker.step(shard.batch, *args, **kwargs)
                (loss * self._weight(shard.rows)).backward()
            for total in self._sums:
                total.add()
            values = torch.stack([loss.detach().double(), *speaker.values()])
            found[shard.number] = torch.cat([values, *statistics.take()])
        return self._table(speaker, found, statistics.size)

    def _cut(self, batch: Any) -> list[Shard]:
        """This rank's shards that have any rows."""
        mine = self._shards()
        numbered = zip(self._numbers(), mine, strict=True)
        first = mine[0][0]
        return [Shard(n, a, b, part(batch, a - first, b - first)) for n, (a, b) in numbered if a < b]

    @contextmanager
    def _alone_with(self, shard: Shard) -> Iterator[None]:
        """Compute a shard as if there were nothing else; random numbers depend on its number."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        numbers = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, shard.number
        with self._seeded(*numbers), replicas.shard(shard.start), self._named(shard):
            yield

    @contextmanager
    def _named(self, shard: Shard) -> Iterator[None]:
        """Say of which shard it is that torch's BatchNorm refuses the only row."""
        try:
            yield
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            expected = "expected batches of two rows or more for BatchNorm"
            found = f"shard {shard.number} of {self.exact} has {shard.rows} of the batch's {self._global_rows}"
            raise ValueError(f"exact {self.exact}: {expected}; {found}") from error

    def _weight(self, rows: int) -> float:
        """What the mean over some rows counts: exact, and at most 1, so that only overflows what would in one batch."""
        return rows / 2.0 ** (self._global_rows - 1).bit_length()

    @contextmanager
    def _seeded(self, *numbers: int) -> Iterator[None]:
        """Inside, torch's, numpy's and Python's generators depend on the seed and these numbers; then they are back."""
        seed = getattr(self.lightning_module, "seed", None) or int(os.environ.get("PL_GLOBAL_SEED", "0"))
        key = keyed.fold_in(seed, *numbers)
        cuda = self.root_device.type == "cuda"
        pythons, numpys = random.getstate(), get_bit_generator()
        set_bit_generator(_spare())  # a copy of numpy's state would take longer than all else here
        try:
            with torch.random.fork_rng([self.root_device] if cuda else []):
                torch.default_generator.manual_seed(key)
                if cuda:  # torch.manual_seed would note a call stack for an unused GPU
                    torch.cuda.manual_seed(key)
                np.random.seed(key)  # noqa: NPY002 - others' modules draw from it
                random.seed(key)
                yield
        finally:
            set_bit_generator(numpys)
            random.setstate(pythons)

    def _table(self, speaker: ShardLogger, found: dict[int, Tensor], statistics: int) -> Tensor:
        """(shards, k), what was found of this rank's shards."""
        if any(start == stop for start, stop in self._spans):
            # A rank without a row has heard nothing, rank zero has one. Tensors arrive on the device they come from.
            speaker.agree(self.broadcast(move_data_to_device(speaker.heard, "cpu")))
        else:
            speaker.agree()
        width = 1 + len(speaker.values()) + statistics
        table = torch.zeros(self.exact or 1, width, dtype=torch.float64, device=self.root_device)
        for number, line in found.items():
            table[number] = line
        return table

    def _gradients(self, total: FixedPointSum, excused: set[int]) -> dict[nn.Parameter, Tensor | None]:
        """The global batch's gradients, None for parameters that had none or are excused."""
        parameters = dict(zip(total.names, total.parameters, strict=True))
        flawed = [name for name in total.flawed() if id(parameters[name]) not in excused]
        if flawed:
            expected = f"expected finite gradients; that of {', '.join(flawed[:3])} is not"
            raise OverflowError(f"--exact {self.exact}: {expected}")
        gradients = zip(total.parameters, total.divided(self._weight(self._global_rows)), strict=True)
        return {p: None if id(p) in excused else gradient for p, gradient in gradients}

    # Evaluation and prediction: batch i belongs to replica i % replicas

    def _is_mine(self) -> bool:
        rank, replicas = self.replica
        return self._evaluated % replicas == rank

    def on_validation_start(self) -> None:
        """Deal from the first rank on."""
        self._evaluated, self._records = 0, []

    def on_test_start(self) -> None:
        """Deal from the first rank on."""
        self.on_validation_start()

    def on_predict_start(self) -> None:
        """Deal from the first rank on."""
        self.on_validation_start()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, if it is this rank's."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch, if it is this rank's."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch."""
        if self.exact is None:
            return super().predict_step(*args, **kwargs)
        with self._by_itself("predict_step"):
            return super().predict_step(*args, **kwargs)

    def _evaluate(self, step: Callable, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.exact is None:
            return step(batch, *args, **kwargs)
        assert self.lightning_module is not None
        mine = self._is_mine()
        self._evaluated += 1
        if not mine:
            return None
        with caught(self.lightning_module) as logged, self._by_itself(step.__name__):
            output = step(batch, *args, **kwargs)
        self._records.append(record(self._evaluated, batch, logged))
        return output

    @contextmanager
    def _by_itself(self, step: str) -> Iterator[None]:
        """Compute a batch as if there were no other; random numbers depend on its number."""
        assert self.lightning_module is not None
        epoch = self.lightning_module.trainer.current_epoch
        with self._seeded(epoch, self._evaluated), collectives.refused(step, self):
            yield

    def _share_evaluation(self, trainer: Trainer) -> None:
        """Have evaluation log the same values on all ranks, and each batch predicted by one of them."""
        warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
        for loop in loops:
            self._replace(loop, "_store_dataloader_outputs", self._log_of_all)
        self._replace(trainer.predict_loop, "_predict_step", self._predict_mine)

    def _replace(self, loop: Any, name: str, method: Callable) -> None:
        """Call `method` with the loop and its own method in that one's place, until teardown."""
        setattr(loop, name, partial(method, loop, partial(getattr(type(loop), name), loop)))
        self._shared.append((loop, name))

    def _log_of_all(self, loop: Any, store_outputs: Callable) -> None:
        """What was logged in a loader's steps comes out at its end, the same on all ranks."""
        assert self.lightning_module is not None
        if self._evaluated <= self.replica[0]:  # no batch was this rank's: its metrics would warn of that
            for metric in (m for m in self.lightning_module.modules() if isinstance(m, Metric)):
                metric._update_count += 1
        records, self._records = self._all_records(), []
        results = loop.trainer._results
        seen = loop._seen_batches_per_dataloader[results.dataloader_idx or 0]
        replay(loop.trainer, records, seen - len(records))
        store_outputs()

    def _all_records(self) -> list[Record]:
        gathered: list[list[Record]] = [self._records]
        if replicas.count() > 1:
            gathered = [[] for _ in range(replicas.count())]
            dist.all_gather_object(gathered, self._records, group=replicas.group())
        return [record for records in gathered for record in records]

    def _predict_mine(self, loop: Any, predict: Callable, *args: Any) -> None:
        """Predict a batch, if it is this rank's; callbacks that write it are called here alone."""
        if self._is_mine():
            predict(*args)
        self._evaluated += 1


@cache
def _spare() -> np.random.MT19937:
    return np.random.MT19937(0)
