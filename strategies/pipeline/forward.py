"""The forward of a module in stages, in evaluation and inside its training step."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from apprentice import keyed, replicas
from apprentice.contract import HasPipelineLoss
from apprentice.errors import BadInput
from strategies.base.gradients import NO_GRADIENT
from strategies.exact.isolation import allow_collectives
from strategies.exact.shards import Shard, bounds
from strategies.pipeline.cutting import StageAssignment
from strategies.pipeline.runner import Event, MicroBatch, PipelineRunner, PipelineStep
from strategies.pipeline.states import RankRandomState

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # between two ways to add up one loss; else 1e-3
ONE_CALL = "one call of forward"
NO_PARAMETERS = "a loss that uses no parameters, of which each rank has some"
NO_DERIVATIVE = "no gradient of forward's output before backward, as other ranks have computed it"

Answer = Callable[["ForwardCall"], Any]  # from a call of `forward` to its output


@dataclass
class ForwardCall:
    """A call of `forward`; in a `training_step` without an `answer` the step ends there."""

    answer: Answer | None = None
    inputs: tuple[Tensor, ...] = ()  # none until it is called
    request: object = None  # what it asks of every stage
    noise: Callable[[], AbstractContextManager[None]] = nullcontext  # the keyed noise of the call

    def microbatch(self, start: int, stop: int, loss: Callable[[Any], Tensor] | None = None) -> MicroBatch:
        """Return the rows `start` to `stop` of the inputs."""
        rows = tuple(x[start:stop] for x in self.inputs)
        return MicroBatch(stop - start, rows, self.request, loss, keyed.slice_rows(start, stop))


class _StepEnds(BaseException):
    """Ends a `training_step` at its call of `forward`."""


class StagedForward:
    """Takes the place of a module's `forward`: the stages of all ranks compute it.

    Args:
        module: whose `training_step` calls it once.
        rank: of this process, by which its random numbers differ from other ranks'.
        in_one_piece: whether evaluation does without micro-batches, for the bits of one device.
    """

    runner: PipelineRunner  # once the module is cut

    def __init__(self, module: LightningModule, rank: int, in_one_piece: bool) -> None:
        self.module, self.in_one_piece = module, in_one_piece
        self.random_state = RankRandomState(rank)
        self.events: list[Event] = []  # of this rank in the last step
        self.losses_match = False  # whether `pipeline_loss` has been seen to be `training_step`'s loss
        self._call: ForwardCall | None = None
        self._pipeline_loss = math.nan

    def __call__(self, *args: Any, request: object = None, **kwargs: Any) -> Any:
        """Compute the module's output, on all ranks; every stage gets the request, if there is one."""
        expected = f"{self.name}.forward: expected calls with tensors by position, rows first"
        for key, x in [*enumerate(args), *kwargs.items()]:
            if key in kwargs or not isinstance(x, Tensor) or not x.dim():
                kind = f"tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{expected}; argument {key} is a {kind}{' by name' if key in kwargs else ''}")
        if not args:
            raise TypeError(f"{expected}; there is none")
        call = self._call
        with allow_collectives():
            if call is None:
                return self._evaluate(ForwardCall(inputs=args, request=request))
            if call.inputs:
                raise self.fault(f"{ONE_CALL}, got a second")
            call.inputs, call.request, call.noise = args, request, keyed.slice_rows(0, len(args[0]))
            if call.answer is None:
                raise _StepEnds
            return call.answer(call)

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def assignment(self) -> StageAssignment:
        return self.runner.assignment

    def trainable_by_stage(self) -> dict[int, dict[str, nn.Parameter]]:
        """Return the trainable parameters of those of this rank's stages that have any."""
        names = {p: name for name, p in self.module.named_parameters() if p.requires_grad}
        by_stage = {
            stage: {names[p]: p for m in modules for p in m.parameters() if p in names}
            for stage, modules in self.runner.local_stages.items()
        }
        return {stage: parameters for stage, parameters in by_stage.items() if parameters}

    def fault(self, expected: str, method: str = "training_step") -> BadInput:
        """Return the error of a method of the module."""
        return BadInput("", f"{self.name}.{method}", expected)

    def _evaluate(self, call: ForwardCall) -> Any:
        assignment, size = self.assignment, len(call.inputs[0])
        # If ranks have several stages, these would wait for each other.
        whole = self.in_one_piece or assignment.stages_per_rank > 1
        count = 1 if whole else min(assignment.num_microbatches, max(size, 1))
        step = PipelineStep([call.microbatch(a, b) for a, b in itertools.pairwise(bounds(size, count))])
        with self.random_state():
            self.runner.forward(step)
        self.events = step.events
        return self.runner.broadcast_output(step)[0]

    @contextmanager
    def answer_with(self, answer: Answer | None) -> Iterator[ForwardCall]:
        """Inside a `training_step` has to call `forward` once."""
        call = self._call = ForwardCall(answer)
        try:
            yield call
        except _StepEnds:
            pass
        except (RuntimeError, NotImplementedError) as error:
            meta, gradient = "meta" in str(error), NO_GRADIENT.search(str(error))
            if call.inputs and (meta or gradient):
                raise self.fault(NO_PARAMETERS if meta else NO_DERIVATIVE) from error
            if call.inputs or not meta:
                raise
            raise self.fault(f"{ONE_CALL}, got none: {error}") from error  # it called a layer of another rank
        finally:
            self._call = None
        if not call.inputs:
            raise self.fault(f"{ONE_CALL}, got none")

    def train(self, step: PipelineStep) -> Any:
        """Send micro-batches forward and backward; return the last stage's outputs."""
        with self.random_state():
            output = self.runner.train(step)
        self.events = step.events
        if not self.losses_match:
            self._pipeline_loss = self.runner.broadcast_loss(step)
        return output

    def loss(self, shard: Shard, weight: float, output: Any) -> Tensor:
        """Return the module's `pipeline_loss` of some rows, weighted."""
        assert isinstance(self.module, HasPipelineLoss)
        with replicas.shard(shard.start):
            loss = self.module.pipeline_loss(output, shard.batch)
        if not isinstance(loss, Tensor) or loss.dim():
            kind = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{self.name}.pipeline_loss: expected a scalar tensor, got {kind}")
        return loss * weight

    def check_rows(self, inputs: Sequence[Tensor], rows: int) -> None:
        """Raise BadInput where `forward` was called with other rows than the batch's."""
        if wrong := [tuple(x.shape) for x in inputs if len(x) != rows]:
            raise self.fault(f"a call of forward with tensors of the batch's {rows} rows, got one of {wrong[0]}")

    def check_loss(self, loss: Tensor) -> None:
        """Raise BadInput where the loss depends on parameters of other ranks."""
        if loss.is_meta:
            raise self.fault(NO_PARAMETERS)

    def compare_losses(self, loss: float, dtype: torch.dtype) -> None:
        """Check once, as soon as they are finite, that `training_step` and `pipeline_loss` give the same loss."""
        finite = math.isfinite(loss), math.isfinite(self._pipeline_loss)
        if not any(finite):
            return
        tolerance = TOLERANCE.get(dtype, 1e-3)
        if not all(finite) or not math.isclose(loss, self._pipeline_loss, rel_tol=tolerance, abs_tol=tolerance):
            expected = f"the loss that training_step returns, {loss:g}, as the mean over micro-batches"
            raise self.fault(f"{expected}; got {self._pipeline_loss:g}", "pipeline_loss")
        self.losses_match = True
