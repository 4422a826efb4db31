"""Pipeline parallelism: each rank holds some layers, and micro-batches of a batch are at different layers at a time."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from apprentice import keyed, replicas
from strategies.base.gradients import averaged, handed_over, set_aside
from strategies.exact import Shard, collectives
from strategies.exact.shard_logging import ShardLogger, shard_logger_of
from strategies.exact.shards import RunningStatistics, bounds, part, rows, share
from strategies.pipeline.calls import Calls, Stopped, known, stop
from strategies.pipeline.microbatches import Event, MicroBatch, Step
from strategies.pipeline.noise import OwnNoise
from strategies.pipeline.runner import PipelineRunner
from strategies.pipeline.schedules import Place, Plan
from strategies.pipeline.staged import Staged
from strategies.pipeline.timing import seconds

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of two ways to add up one loss; else 1e-3


class PipelineStrategy(Staged):
    """Trains a LightningModule that is cut into stages, with the numbers of one device.

    The module offers `pipeline_stages()`, modules in order whose composition is its `forward`, and
    `pipeline_loss(output, batch)`, the loss of its `training_step` for some rows of a batch, a mean over these rows.
    Its hooks stay as they are: wherever they call `forward`, all ranks get what the last stage gives.

    Args:
        schedule: torch's name of the order in which micro-batches go forward and backward.
        num_microbatches: into which a batch is cut; when not given, four for each rank of a pipeline; or `exact`'s.
        data_parallel_size: pipelines side by side, which share a batch; the ranks of one follow one another.
        stages_per_rank: stages on each rank; when not given, as many as the schedule needs.
        balance: how modules are dealt to stages: by their "parameters", by the "time" they take for a micro-batch, or
            how many each stage gets.
        **kwargs: Staged's.

    Raises:
        ValueError: an option's value can't be used, alone, with these devices or with the module.
    """

    def __init__(
        self,
        schedule: Schedule = "1F1B",
        num_microbatches: int | None = None,
        data_parallel_size: int = 1,
        stages_per_rank: int | None = None,
        balance: Literal["parameters", "time"] | list[int] = "parameters",
        **kwargs: Any,
    ) -> None:
        super().__init__(data_parallel_size, stages_per_rank, balance, **kwargs)
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule {schedule}: expected {', '.join(get_args(Schedule))}")
        if num_microbatches is not None and num_microbatches < 1:
            raise ValueError(f"num_microbatches {num_microbatches}: expected at least 1")
        self.schedule, self.num_microbatches = schedule, num_microbatches
        self.events: list[Event] = []
        self._runner: PipelineRunner
        self._agreed = False
        self._calls: Calls | None = None

    def _planned(self) -> Plan:
        ranks = self.pipeline_size
        shards = None if self.exact is None else -(-self.exact // self.data_parallel_size)
        if shards is not None and self.num_microbatches not in {None, shards}:
            expected = f"expected {shards} or none, as the shards of exact {self.exact} are the micro-batches"
            raise ValueError(f"num_microbatches {self.num_microbatches}: {expected}")
        count = shards or self.num_microbatches or 4 * ranks
        try:
            return Plan(self.schedule, ranks, self.stages_per_rank, count)
        except ValueError as error:
            expected = f"expected one for {count} micro-batches and {ranks} ranks"
            raise ValueError(f"schedule {self.schedule}: {expected}: {error}") from None

    def _settled(self, place: Place) -> None:
        self._runner, self._agreed = PipelineRunner(place), False
        self._noise = OwnNoise(keyed.fold_in(torch.initial_seed(), self.global_rank))

    def _seconds(self, module: LightningModule, modules: list[nn.Module]) -> list[float]:
        """What each module takes for the first micro-batch, measured on rank zero; others read it and wait."""
        with torch.random.fork_rng():
            loaders = CombinedLoader(module.trainer.fit_loop._data_source.dataloader(), "max_size_cycle")
            batch, *_ = next(iter(loaders))
        if not self.is_global_zero:
            return []
        module.to(self.root_device)
        with torch.random.fork_rng(), replicas.shard(0):
            batch = self.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = Strategy.batch_to_device(self, batch)
            stop = -(-rows(batch) // self.plan.num_microbatches)
            number = [0] if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else []
            piece = self._asked(shard_logger_of(module), Shard(0, 0, stop, part(batch, 0, stop)), *number)
            with self.precision_plugin.train_step_context(), piece.context():
                return seconds(modules, piece.inputs)

    # What the module calls

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the module's `forward`, on all ranks at once."""
        with collectives.allowed():
            return self._answered(*args, **kwargs)

    def _answered(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(enumerate(args)) | kwargs
        wrong = [key for key, x in named.items() if key in kwargs or not isinstance(x, Tensor) or not x.dim()]
        if wrong or not args:
            found = f"argument {wrong[0]} is {_described(named[wrong[0]])}" if wrong else "there is none"
            found += " by name" if wrong and wrong[0] in kwargs else ""
            expected = "expected calls with tensors by position, rows first"
            raise TypeError(f"{type(self.lightning_module).__name__}.forward: {expected}; {found}")
        if self._calls is not None:
            return self._calls.forward(args)
        size = len(args[0])
        # In one piece for the bits of one device, and where ranks have several stages: they'd wait for their own.
        whole = self.exact is not None or self.plan.stages_per_rank > 1
        cuts = bounds(size, 1 if whole else min(self.plan.num_microbatches, max(size, 1)))
        spans = itertools.pairwise(cuts)
        step = Step([MicroBatch(b - a, tuple(x[a:b] for x in args), None, keyed.part(a, b)) for a, b in spans])
        with self._noise():
            self._runner.forward(step)
        self.events = step.events
        return self._runner.joined(step)[0]

    # Training

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of the batch; its backward hands over the gradients that the schedule has made on the way."""
        if self.exact is not None:
            return super().training_step(batch, *args, **kwargs)
        assert self.lightning_module is not None
        with set_aside(self._trainable), self._calling(partial(self._through, batch)) as calls:
            with calls.expected_once():
                output = Strategy.training_step(self, batch, *args, **kwargs)
            gradients = {p: p.grad for p in self._trainable().values()}
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        if not self._agreed:
            self._agree(loss.item(), loss.dtype)
        loss = handed_over(loss.detach(), averaged(gradients))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @contextmanager
    def _calling(self, answer: Callable[[tuple[Tensor, ...]], Any]) -> Iterator[Calls]:
        """Inside, this is what the module's `forward` does, once."""
        self._calls = Calls(type(self.lightning_module).__name__, answer)
        try:
            yield self._calls
        finally:
            self._calls = None

    def _through(self, batch: Any, inputs: tuple[Tensor, ...]) -> Any:
        """Send a batch through the pipeline, micro-batch by micro-batch."""
        size = rows(batch)
        self._check_rows(inputs, size)
        counts = share(batch) / max(size, 1)
        spans = list(itertools.pairwise(bounds(size, self.plan.num_microbatches)))
        pieces = [
            MicroBatch(
                b - a,
                tuple(x[a:b] for x in inputs),
                partial(self._loss, Shard(number, a, b, part(batch, a, b)), (b - a) * counts),
                keyed.part(a, b),
            )
            for number, (a, b) in enumerate(spans)
        ]
        return self._train(Step(pieces))

    def _check_rows(self, inputs: tuple[Tensor, ...], rows: int) -> None:
        if wrong := [tuple(x.shape) for x in inputs if len(x) != rows]:
            expected = f"expected a call of forward with tensors of the batch's {rows} rows"
            raise ValueError(f"{type(self.lightning_module).__name__}.training_step: {expected}, got one of {wrong[0]}")

    def _train(self, step: Step) -> Any:
        with self._noise():
            output = self._runner.train(step)
        if self.exact is not None and self._noise.drawn:
            raise ValueError(f"exact {self.exact}: expected noise from apprentice.keyed in a pipeline, not torch's")
        self.events = step.events
        if not self._agreed:
            self._found = self._runner.from_last(sum(loss.item() for loss in step.losses.values()))
        return output

    def _loss(self, shard: Shard, weight: float, output: Any) -> Tensor:
        module: Any = self.lightning_module
        alone = nullcontext() if self.exact is None else collectives.refused("pipeline_loss", self)
        with replicas.shard(shard.start), alone:
            loss = module.pipeline_loss(output, shard.batch)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{type(module).__name__}.pipeline_loss: expected a scalar tensor, got {found}")
        return loss * weight

    def _agree(self, loss: float, dtype: torch.dtype) -> None:
        """Compare, once, what `training_step` returns with what gradients were computed of."""
        finite = math.isfinite(loss), math.isfinite(self._found)
        if not any(finite):
            return  # nothing to compare yet
        tolerance = TOLERANCE.get(dtype, 1e-3)
        if not all(finite) or not math.isclose(loss, self._found, rel_tol=tolerance, abs_tol=tolerance):
            expected = f"expected the loss that training_step returns, {loss:g}, as the mean over micro-batches"
            raise ValueError(f"{type(self.lightning_module).__name__}.pipeline_loss: {expected}; got {self._found:g}")
        self._agreed = True

    # The exact mode: a shard is a micro-batch

    def _parts(self) -> list[dict[str, nn.Parameter]]:
        return list(self._trained().values())

    def _trained(self) -> dict[int, dict[str, nn.Parameter]]:
        """The trainable parameters of those of this rank's stages that have any."""
        assert self.lightning_module is not None
        names = {p: name for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        found = {}
        for stage in self._runner.place.mine:
            own = dict.fromkeys(p for m in self._runner.place.stages[stage] for p in m.parameters() if p in names)
            found[stage] = {names[p]: p for p in own}
        return {stage: own for stage, own in found.items() if own}

    def _statistics(self, module: LightningModule) -> RunningStatistics:
        return RunningStatistics(*(m for stage in self._runner.place.mine for m in self._runner.place.stages[stage]))

    def _forward_and_backward(
        self, speaker: ShardLogger, statistics: RunningStatistics, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        sums = dict(zip(self._trained(), self._sums, strict=True))
        shards = self._cut(batch)
        nothing = Shard(0, 0, 0, part(batch, 0, 0))
        pieces = [self._asked(speaker, shard, *args, **kwargs) for shard in shards or [nothing]]
        empty = MicroBatch(0, tuple(x[:0] for x in pieces[0].inputs), None, nullcontext)
        pieces += [empty] * (self.plan.num_microbatches - len(pieces))
        by_stage = {stage: RunningStatistics(*self._runner.place.stages[stage]) for stage in self._runner.place.mine}
        taken: dict[int, list[Tensor]] = {}

        def computed(stage: int) -> None:
            if stage in sums:
                sums[stage].add()

        def went_forward(stage: int, number: int) -> None:
            taken.setdefault(number, []).extend(by_stage[stage].take())

        step = Step(pieces, computed, went_forward)
        with self.precision_plugin.train_step_context():
            output = self._train(step)
        found: dict[int, Tensor] = {}
        for number, shard in enumerate(shards):
            start = shard.start - shards[0].start
            answer = tree_map(partial(_rows, start, start + shard.rows), output)
            context = self.precision_plugin.train_step_context
            with self._alone_with(shard), self._calling(partial(known, answer)), context():
                loss = speaker.step(shard.batch, *args, **kwargs)
            values = torch.stack([loss.detach().double(), *speaker.values()])
            found[shard.number] = torch.cat([values, *taken[number]])
        if not self._agreed:
            self._agree(sum(found[s.number][0].item() * self._weight(s.rows) for s in shards), torch.float32)
        return self._table(speaker, found, statistics.size)

    def _asked(self, speaker: ShardLogger, shard: Shard, *args: Any, **kwargs: Any) -> MicroBatch:
        """What the module calls `forward` with for a shard; it gets no answer yet."""
        with self._alone_with(shard), self.precision_plugin.train_step_context():
            with self._calling(stop) as calls, calls.expected_once(), suppress(Stopped):
                speaker.step(shard.batch, *args, **kwargs)
            noise, inputs = calls.noise, calls.inputs
        self._check_rows(inputs, shard.rows)

        @contextmanager
        def alone() -> Iterator[None]:
            with replicas.shard(shard.start), noise(), self._named(shard):
                yield

        return MicroBatch(shard.rows, inputs, partial(self._loss, shard, self._weight(shard.rows)), alone)


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _rows(start: int, stop: int, leaf: Any) -> Any:
    return leaf[start:stop].clone() if isinstance(leaf, Tensor) else leaf
