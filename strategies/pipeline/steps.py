"""How a pipeline runs batches: in micro-batches, which in the exact mode are the shards."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import Batch
from apprentice.errors import BadInput
from apprentice.private import tree_map_only
from strategies.base.gradients import attach_gradients, average, set_aside
from strategies.base.shared_replica import SharedReplica
from strategies.base.steps import PlainSteps
from strategies.exact.isolation import refuse_collectives
from strategies.exact.shard_logging import ShardLogger, shard_logger_of
from strategies.exact.shards import Shard, bounds, part, rows
from strategies.exact.steps import ExactSteps
from strategies.exact.training import RunningStatistics, ShardedTraining, shard_values
from strategies.pipeline.forward import ForwardCall, StagedForward
from strategies.pipeline.runner import MicroBatch, PipelineStep


class PipelineSteps(PlainSteps):
    """Cuts a rank's rows into micro-batches.

    Args:
        strategy: that holds these steps, and puts the module's `forward` here once the module is cut.
        num_microbatches: of a batch; None: four for each rank of a pipeline.
        pipelines: that share a batch.
    """

    forward: StagedForward

    def __init__(self, strategy: SharedReplica, num_microbatches: int | None, pipelines: int) -> None:
        self.strategy, self.num_microbatches, self.pipelines = strategy, num_microbatches, pipelines

    def count_microbatches(self) -> int:
        """Return the number of micro-batches that are chosen, or four for each rank."""
        return self.num_microbatches or 4 * self.strategy.replica_size

    def setup(self, trainer: Trainer) -> None:
        """Let all ranks of a single pipeline read the same batches."""
        if self.pipelines == 1:
            self.strategy._read_whole_batches(trainer)

    def training_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the batch; its backward adds the gradients that the schedule has computed."""
        forward, parameters = self.forward, self.forward.trainable_by_stage
        with set_aside(lambda: _merge(parameters())):
            with forward.answer_with(partial(self._train_batch, batch)):
                output = Strategy.training_step(self.strategy, batch, *args, **kwargs)
            gradients = {p: p.grad for p in _merge(parameters()).values()}
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        forward.check_loss(loss)
        if not forward.losses_match:
            forward.compare_losses(loss.item(), loss.dtype)
        loss = attach_gradients(loss.detach(), average(gradients))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _train_batch(self, batch: Any, call: ForwardCall) -> Any:
        forward, size = self.forward, rows(batch)
        forward.check_rows(call.inputs, size)
        # A batch whose rows are distributed unevenly says what its mean counts in the mean over replicas.
        weight = (batch.share if isinstance(batch, Batch) else 1.0) / max(size, 1)
        pieces = []
        for number, (a, b) in enumerate(itertools.pairwise(bounds(size, forward.assignment.num_microbatches))):
            shard = Shard(number, a, b, part(batch, a, b))
            pieces.append(call.microbatch(a, b, partial(forward.loss, shard, (b - a) * weight)))
        return forward.train(PipelineStep(pieces))


class PipelinedShards(ShardedTraining):
    """Computes the shards of this rank's pipeline."""

    forward: StagedForward

    def _parameter_groups(self) -> list[dict[str, nn.Parameter]]:
        return list(self.forward.trainable_by_stage().values())

    def _statistics(self) -> RunningStatistics:
        return RunningStatistics(*itertools.chain(*self.forward.runner.local_stages.values()))

    def _statistics_by_stage(self) -> dict[int, RunningStatistics]:
        return {stage: RunningStatistics(*modules) for stage, modules in self.forward.runner.local_stages.items()}

    def _collect(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Send the shards forward only; the ranks of a pipeline all collect what the last stage has computed."""
        logger, mine, runner = shard_logger_of(self.module), self._shards_of(batch), self.forward.runner
        shards = mine or [Shard(0, *self._spans[0], batch)]
        pieces = [self.microbatch(logger, shard, *args, **kwargs) for shard in shards]
        by_stage = self._statistics_by_stage()

        def after_forward(stage: int, _number: int) -> None:
            by_stage[stage].take()

        step = PipelineStep(pieces, after_forward=after_forward)
        with self.forward.random_state(), self._step_context():
            runner.forward(step)
        output = runner.broadcast_output(step)[0]
        for shard in shards:
            shard_output = _rows_of(output, shard, shards)
            tree_map_only(Tensor, lambda x: x.requires_grad_(x.is_floating_point()), shard_output)
            with self._isolate(shard, is_mine=bool(mine)), self.forward.answer_with(partial(_answer, shard_output)):
                logger.step(shard.batch, *args, **kwargs)

    def _forward_and_backward(
        self, logger: ShardLogger, statistics: RunningStatistics, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        shards = self._shards_of(batch)
        sample = shards or [Shard(0, 0, 0, part(batch, 0, 0))]  # an empty one shows the inputs' layout
        pieces = [self.microbatch(logger, shard, *args, **kwargs) for shard in sample]
        empty = MicroBatch(0, tuple(x[:0] for x in pieces[0].inputs), pieces[0].request, None, nullcontext)
        pieces += [empty] * (self.forward.assignment.num_microbatches - len(pieces))
        sums = dict(zip(self.forward.trainable_by_stage(), self._sums, strict=True))
        by_stage = self._statistics_by_stage()
        taken: dict[int, list[Tensor]] = {}  # statistics of each shard

        def after_backward(stage: int) -> None:
            if stage in sums:
                sums[stage].add()

        def after_forward(stage: int, number: int) -> None:
            taken.setdefault(number, []).extend(by_stage[stage].take())

        with self._step_context():
            output = self.forward.train(PipelineStep(pieces, after_backward, after_forward))
        if self.forward.random_state.drawn:
            raise self.strategy._fault("noise from apprentice.keyed in a pipeline, not torch's")

        def row(number: int, shard: Shard) -> Tensor:
            answer = partial(_answer, _rows_of(output, shard, shards))
            with self._isolate(shard), self.forward.answer_with(answer), self._step_context():
                loss = logger.step(shard.batch, *args, **kwargs)
            self.forward.check_loss(loss)
            return shard_values(loss, logger, taken[number])

        results = {shard.number: row(number, shard) for number, shard in enumerate(shards)}
        if not self.forward.losses_match:
            losses = (results[s.number][0].item() * self._weight(s.rows) for s in shards)
            self.forward.compare_losses(sum(losses), torch.float32)
        return self._table(logger, results, statistics.size)

    def microbatch(self, logger: ShardLogger, shard: Shard, *args: Any, **kwargs: Any) -> MicroBatch:
        """Return a shard as a micro-batch; runs its step up to the call of `forward`, to see the inputs."""
        with self._isolate(shard), self._step_context(), self.forward.answer_with(None) as call:
            logger.step(shard.batch, *args, **kwargs)
        self.forward.check_rows(call.inputs, shard.rows)

        @contextmanager
        def isolate() -> Iterator[None]:
            with self._relations.shard(), replicas.shard(shard.start), call.noise(), self._name_shard(shard):
                yield

        return MicroBatch(shard.rows, call.inputs, call.request, partial(self._loss, shard), isolate)

    def _loss(self, shard: Shard, output: Any) -> Tensor:
        with refuse_collectives("pipeline_loss", self.strategy):
            return self.forward.loss(shard, self._weight(shard.rows), output)


class ExactPipelineSteps(ExactSteps):
    """Sends shards through the pipeline as micro-batches; arguments as of PipelineSteps and ExactSteps."""

    training_class = PipelinedShards
    training: PipelinedShards

    def __init__(self, strategy: SharedReplica, shards: int, num_microbatches: int | None, pipelines: int) -> None:
        super().__init__(strategy, shards)
        self.num_microbatches, self.pipelines = num_microbatches, pipelines

    def needs_group(self) -> bool:
        return True

    @property
    def forward(self) -> StagedForward:
        return self.training.forward

    @forward.setter
    def forward(self, forward: StagedForward) -> None:
        self.training.forward = forward

    def count_microbatches(self) -> int:
        """Return the number of shards of a pipeline; BadInput if another one is chosen."""
        shards, chosen = -(-self.shards // self.pipelines), self.num_microbatches
        if chosen not in {None, shards}:
            expected = f"{shards} or none, as the shards of exact {self.shards} are the micro-batches"
            raise BadInput("num_microbatches", chosen, expected)
        return shards


def _rows_of(output: Any, shard: Shard, shards: Sequence[Shard]) -> Any:
    """Return a shard's rows of the output of several shards."""
    rows = slice(shard.start - shards[0].start, shard.stop - shards[0].start)
    return tree_map_only(Tensor, lambda x: x[rows].clone(), output)


def _answer(output: Any, _call: ForwardCall) -> Any:
    return output


def _merge(parameters: Mapping[int, Mapping[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Merge the stages' parameters by name."""
    return {name: p for by_name in parameters.values() for name, p in by_name.items()}
