"""The forward and the training step of a module in stages."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from apprentice import keyed, replicas
from apprentice.private import tree_map_only
from strategies.base.gradients import NO_GRADIENT, averaged, handed_over, set_aside
from strategies.base.shared_replica import SharedReplica
from strategies.exact import Exact
from strategies.exact.collectives import allow_collectives, refuse_collectives
from strategies.exact.shard_logging import ShardLogger, shard_logger_of
from strategies.exact.shards import Shard, bounds, part, rows
from strategies.exact.training import RunningStatistics, row_of
from strategies.pipeline.cutting import StageAssignment
from strategies.pipeline.microbatches import Event, MicroBatch, PipelineStep
from strategies.pipeline.runner import PipelineRunner
from strategies.pipeline.states import RankRandomState

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # between two ways to add up one loss; else 1e-3
ONE_CALL = "expected one call of forward"
NO_PARAMETERS = "expected a loss that uses no parameters, of which each rank has some"
NO_DERIVATIVE = "expected no gradient of forward's output before backward, as other ranks have computed it"


@dataclass
class ForwardCall:
    """A call of `forward` in a `training_step`; without an `answer` the step ends there."""

    answer: Callable[[tuple[Tensor, ...]], Any] | None
    inputs: tuple[Tensor, ...] = ()  # none until it is called
    noise: Callable[[], AbstractContextManager] = nullcontext  # the keyed noise of the call


class _StepEnds(BaseException):
    """Ends a `training_step` at its call of `forward`."""


class PipelineTraining(SharedReplica, Exact):
    """Computes a module's `forward` with the stages of all ranks; under `exact` a shard is a micro-batch."""

    assignment: StageAssignment
    events: list[Event]  # of this rank in the last step
    _runner: PipelineRunner
    _random_state: RankRandomState
    _call: ForwardCall | None = None
    _losses_match = False  # whether `pipeline_loss` has been seen to be `training_step`'s loss

    # The module's forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        expected = f"{self._name}.forward: expected calls with tensors by position, rows first"
        for key, x in [*enumerate(args), *kwargs.items()]:
            if key in kwargs or not isinstance(x, Tensor) or not x.dim():
                kind = f"tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{expected}; argument {key} is a {kind}{' by name' if key in kwargs else ''}")
        if not args:
            raise TypeError(f"{expected}; there is none")
        call = self._call
        with allow_collectives():
            if call is None:
                return self._evaluate_stages(args)
            if call.inputs:
                raise ValueError(f"{self._name}.training_step: {ONE_CALL}, got a second")
            call.inputs, call.noise = args, keyed.part(0, len(args[0]))
            if call.answer is None:
                raise _StepEnds
            return call.answer(args)

    @property
    def _name(self) -> str:
        return type(self.lightning_module).__name__

    def _evaluate_stages(self, inputs: tuple[Tensor, ...]) -> Any:
        size = len(inputs[0])
        # In one piece for the bits of one device, or if ranks have several stages: these would wait for each other.
        whole = self.exact is not None or self.assignment.stages_per_rank > 1
        count = 1 if whole else min(self.assignment.num_microbatches, max(size, 1))
        step = PipelineStep([_microbatch(inputs, a, b) for a, b in itertools.pairwise(bounds(size, count))])
        with self._random_state():
            self._runner.forward(step)
        self.events = step.events
        return self._runner.broadcast_output(step)[0]

    @contextmanager
    def _answering(self, answer: Callable[[tuple[Tensor, ...]], Any] | None) -> Iterator[ForwardCall]:
        """Inside a `training_step` has to call `forward` once."""
        call = self._call = ForwardCall(answer)
        none = f"{self._name}.training_step: {ONE_CALL}, got none"
        try:
            yield call
        except _StepEnds:
            pass
        except (RuntimeError, NotImplementedError) as error:
            meta, gradient = "meta" in str(error), NO_GRADIENT.search(str(error))
            if call.inputs and (meta or gradient):
                expected = NO_PARAMETERS if meta else NO_DERIVATIVE
                raise ValueError(f"{self._name}.training_step: {expected}") from error
            if call.inputs or not meta:
                raise
            raise ValueError(f"{none}: {error}") from error  # the step called a layer of another rank
        finally:
            self._call = None
        if not call.inputs:
            raise ValueError(none)

    # Training

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of the batch; its backward adds the gradients that the schedule has computed."""
        if self.exact is not None:
            return super().training_step(batch, *args, **kwargs)
        with set_aside(self._trainable):
            with self._answering(partial(self._train_batch, batch)):
                output = Strategy.training_step(self, batch, *args, **kwargs)
            gradients = {p: p.grad for p in self._trainable().values()}
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        self._check_loss(loss)
        if not self._losses_match:
            self._compare_losses(loss.item(), loss.dtype)
        loss = handed_over(loss.detach(), averaged(gradients))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _check_loss(self, loss: Tensor) -> None:
        if loss.is_meta:
            raise ValueError(f"{self._name}.training_step: {NO_PARAMETERS}")

    def _train_batch(self, batch: Any, inputs: tuple[Tensor, ...]) -> Any:
        size = rows(batch)
        self._check_rows(inputs, size)
        # A batch whose rows are distributed unevenly says what its mean counts in the mean over replicas.
        weight = getattr(batch, "share", 1.0) / max(size, 1)
        pieces = []
        for number, (a, b) in enumerate(itertools.pairwise(bounds(size, self.assignment.num_microbatches))):
            shard = Shard(number, a, b, part(batch, a, b))
            pieces.append(_microbatch(inputs, a, b, partial(self._loss, shard, (b - a) * weight)))
        return self._train(PipelineStep(pieces))

    def _check_rows(self, inputs: tuple[Tensor, ...], rows: int) -> None:
        if wrong := [tuple(x.shape) for x in inputs if len(x) != rows]:
            expected = f"expected a call of forward with tensors of the batch's {rows} rows"
            raise ValueError(f"{self._name}.training_step: {expected}, got one of {wrong[0]}")

    def _train(self, step: PipelineStep) -> Any:
        with self._random_state():
            output = self._runner.train(step)
        if self.exact is not None and self._random_state.drawn:
            raise ValueError(f"exact {self.exact}: expected noise from apprentice.keyed in a pipeline, not torch's")
        self.events = step.events
        if not self._losses_match:
            self._pipeline_loss = self._runner.broadcast_loss(step)
        return output

    def _loss(self, shard: Shard, weight: float, output: Any) -> Tensor:
        module: Any = self.lightning_module
        refused = nullcontext() if self.exact is None else refuse_collectives("pipeline_loss", self)
        with replicas.shard(shard.start), refused:
            loss = module.pipeline_loss(output, shard.batch)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{self._name}.pipeline_loss: expected a scalar tensor, got {found}")
        return loss * weight

    def _compare_losses(self, loss: float, dtype: torch.dtype) -> None:
        """Check once, as soon as they are finite, that `training_step` and `pipeline_loss` give the same loss."""
        finite = math.isfinite(loss), math.isfinite(self._pipeline_loss)
        if not any(finite):
            return
        tolerance = TOLERANCE.get(dtype, 1e-3)
        if not all(finite) or not math.isclose(loss, self._pipeline_loss, rel_tol=tolerance, abs_tol=tolerance):
            expected = f"expected the loss that training_step returns, {loss:g}, as the mean over micro-batches"
            raise ValueError(f"{self._name}.pipeline_loss: {expected}; got {self._pipeline_loss:g}")
        self._losses_match = True

    # Under exact

    def _parameter_groups(self) -> list[dict[str, nn.Parameter]]:
        return list(self._trainable_by_stage().values())

    def _trainable_by_stage(self) -> dict[int, dict[str, nn.Parameter]]:
        """The trainable parameters of those of this rank's stages that have any."""
        names = {p: name for name, p in self._module.named_parameters() if p.requires_grad}
        own = {
            stage: {names[p]: p for m in modules for p in m.parameters() if p in names}
            for stage, modules in self._runner.own.items()
        }
        return {stage: parameters for stage, parameters in own.items() if parameters}

    def _statistics(self) -> RunningStatistics:
        return RunningStatistics(*itertools.chain(*self._runner.own.values()))

    def _collect(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Send the shards forward only; the ranks of a pipeline all collect what the last stage has computed."""
        logger, mine = shard_logger_of(self._module), self._shards(batch)
        shards = mine or [Shard(0, *self._spans[0], batch)]
        pieces = [self._shard_microbatch(logger, shard, *args, **kwargs) for shard in shards]
        by_stage = {stage: RunningStatistics(*modules) for stage, modules in self._runner.own.items()}

        def after_forward(stage: int, _number: int) -> None:
            by_stage[stage].take()

        step = PipelineStep(pieces, after_forward=after_forward)
        with self._random_state(), self.precision_plugin.train_step_context():
            self._runner.forward(step)
        output = self._runner.broadcast_output(step)[0]
        for shard in shards:
            known = self._rows_of(output, shard, shards)
            tree_map_only(Tensor, lambda x: x.requires_grad_(x.is_floating_point()), known)
            with self._isolated_shard(shard, own=bool(mine)), self._answering(partial(_answer, known)):
                logger.step(shard.batch, *args, **kwargs)

    @staticmethod
    def _rows_of(output: Any, shard: Shard, shards: Sequence[Shard]) -> Any:
        rows = slice(shard.start - shards[0].start, shard.stop - shards[0].start)
        return tree_map_only(Tensor, lambda x: x[rows].clone(), output)

    def _forward_and_backward(
        self, logger: ShardLogger, statistics: RunningStatistics, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        shards = self._shards(batch)
        some = shards or [Shard(0, 0, 0, part(batch, 0, 0))]
        pieces = [self._shard_microbatch(logger, shard, *args, **kwargs) for shard in some]
        empty = MicroBatch(0, tuple(x[:0] for x in pieces[0].inputs), None, nullcontext)
        pieces += [empty] * (self.assignment.num_microbatches - len(pieces))
        sums = dict(zip(self._trainable_by_stage(), self._sums, strict=True))
        by_stage = {stage: RunningStatistics(*modules) for stage, modules in self._runner.own.items()}
        taken: dict[int, list[Tensor]] = {}

        def after_backward(stage: int) -> None:
            if stage in sums:
                sums[stage].add()

        def after_forward(stage: int, number: int) -> None:
            taken.setdefault(number, []).extend(by_stage[stage].take())

        step, context = PipelineStep(pieces, after_backward, after_forward), self.precision_plugin.train_step_context
        with context():
            output = self._train(step)

        def row(number: int, shard: Shard) -> Tensor:
            known = self._rows_of(output, shard, shards)
            with self._isolated_shard(shard), self._answering(partial(_answer, known)), context():
                loss = logger.step(shard.batch, *args, **kwargs)
            self._check_loss(loss)
            return row_of(loss, logger, taken[number])

        results = {shard.number: row(number, shard) for number, shard in enumerate(shards)}
        if not self._losses_match:
            losses = (results[s.number][0].item() * self._weight(s.rows) for s in shards)
            self._compare_losses(sum(losses), torch.float32)
        return self._table(logger, results, statistics.size)

    def _shard_microbatch(self, logger: ShardLogger, shard: Shard, *args: Any, **kwargs: Any) -> MicroBatch:
        # The step runs up to its call of `forward`, to see the inputs.
        with self._isolated_shard(shard), self.precision_plugin.train_step_context(), self._answering(None) as call:
            logger.step(shard.batch, *args, **kwargs)
        self._check_rows(call.inputs, shard.rows)

        @contextmanager
        def isolated() -> Iterator[None]:
            related = self._relations.shard()
            with related, replicas.shard(shard.start), call.noise(), self._shard_named(shard):
                yield

        return MicroBatch(shard.rows, call.inputs, partial(self._loss, shard, self._weight(shard.rows)), isolated)


def _answer(output: Any, _inputs: tuple[Tensor, ...]) -> Any:
    return output


def _microbatch(
    inputs: tuple[Tensor, ...], start: int, stop: int, loss: Callable[[Any], Tensor] | None = None
) -> MicroBatch:
    return MicroBatch(stop - start, tuple(x[start:stop] for x in inputs), loss, keyed.part(start, stop))
