"""torch's pipeline schedules, run over the stages of one rank."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from strategies.base.stages import chained
from strategies.pipeline.buffers import UNIT, Layout, Packing
from strategies.pipeline.microbatches import PipelineStep, last_output, stage_tensors


class StageAssignment:
    """Which rank computes which stages under a schedule; raises torch's ValueError where it can't run."""

    def __init__(self, schedule: str, ranks: int, stages_per_rank: int | None, num_microbatches: int) -> None:
        self.schedule_class, self.num_microbatches = get_schedule_class(schedule), num_microbatches
        self.is_multi = issubclass(self.schedule_class, PipelineScheduleMulti)
        self.stages_per_rank = stages_per_rank or (2 if self.is_multi else 1)
        if not self.is_multi and self.stages_per_rank != 1:
            raise ValueError(f"{schedule} has one stage on each rank")
        self.num_stages = ranks * self.stages_per_rank
        stand_ins = [SimpleNamespace(num_stages=self.num_stages, group_size=ranks, group_rank=0, stage_index=i,
                     is_first=False, is_last=False, submod=None) for i in range(self.stages_per_rank)]  # fmt: skip
        places = getattr(self.schedule_of(stand_ins), "stage_index_to_group_rank", None) or range(ranks)
        self.rank_of = [places[stage] for stage in range(self.num_stages)]

    def schedule_of(self, stages: Sequence[Any], **options: Any) -> Any:
        """Torch's schedule over a rank's stages; the last stage's output is the loss."""
        stage = stages if self.is_multi else stages[0]
        return self.schedule_class(stage, self.num_microbatches, loss_fn=lambda output, _: output, **options)


@dataclass
class LocalStages:
    """The stages of this rank."""

    assignment: StageAssignment
    modules: Sequence[Sequence[nn.Module]]  # of every stage
    group: dist.ProcessGroup  # the ranks of this pipeline
    device: torch.device

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        ranks = self.assignment.rank_of
        self.own = {stage: self.modules[stage] for stage, rank in enumerate(ranks) if rank == self.rank}


class LocalSchedule:
    """A schedule over this rank's stages, for one layout of the stages' inputs and at most `capacity` rows."""

    def __init__(self, local: LocalStages, layouts: Mapping[int, Sequence[Layout]], form: Any, capacity: int) -> None:
        self.form, self.capacity = form, capacity
        packings = {stage: Packing(found, capacity) for stage, found in layouts.items()}
        self._modules = [_StageModule(i, local, packings.get(i), packings.get(i + 1)) for i in local.own]
        stages = [_RecordedStage(module, local) for module in self._modules]
        self._schedule = local.assignment.schedule_of(stages, scale_grads=False)

    def run(self, step: PipelineStep) -> None:
        """Send the micro-batches forward and backward; raises what a stage has raised."""
        for module in self._modules:
            module.step = step
        torch_logger = logging.getLogger("torch.distributed.pipelining.schedules")
        before, torch_logger.disabled = torch_logger.disabled, True  # it prints the whole schedule if a stage fails
        try:
            self._schedule.step(target=torch.zeros(len(step.microbatches)), return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None
        finally:
            torch_logger.disabled = before
            for module in self._modules:
                module.step = PipelineStep([])


class _StageModule(nn.Module):
    """A stage for torch's schedules: from a buffer to a buffer; the last stage returns the loss."""

    def __init__(self, stage: int, local: LocalStages, received: Packing | None, sent: Packing | None) -> None:
        super().__init__()
        self.stage, self.received, self.sent, self.device = stage, received, sent, local.device
        self.layers = nn.ModuleList(local.own[stage])
        self.step, self.number = PipelineStep([]), 0  # and its current micro-batch

    def forward(self, buffer: Tensor | None = None) -> Tensor:
        piece = self.step.microbatches[self.number]
        source = torch.zeros(1, dtype=UNIT, device=self.device, requires_grad=True) if buffer is None else buffer
        if not piece.rows:
            return _Tied.apply(self.zeros(self.device), source)
        x = piece.inputs if self.received is None else self.received.unpack(source, piece.rows)
        with piece.context():
            y = chained(self.layers, x)
            self.step.after_forward(self.stage, self.number)
            if self.sent is None:
                out = self._loss(y)
            else:
                out = self.sent.pack(stage_tensors(y, self.layers[-1], piece.rows), source)
        if self.received is not None and not self.received.differentiable:
            return _Tied.apply(out, source)
        return out

    def zeros(self, device: torch.device | str) -> Tensor:
        """An output of zeros; the loss is float64, into which every loss fits without rounding."""
        if self.sent is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.zeros(self.sent.units, dtype=UNIT, device=device)

    def _loss(self, output: Any) -> Tensor:
        piece = self.step.microbatches[self.number]
        assert piece.loss is not None
        self.step.outputs[self.number] = last_output(output, self.layers[-1], piece.rows)
        loss = piece.loss(output)
        self.step.losses[self.number] = loss.detach()
        return loss.double()


class _RecordedStage(PipelineStage):
    """torch's stage. It tells the module the micro-batch's number, and the step what has been computed."""

    def __init__(self, module: _StageModule, local: LocalStages) -> None:
        self.module = module
        inputs = module.received.empty("meta").requires_grad_() if module.received else ()
        output = module.zeros("meta").requires_grad_()
        count = local.assignment.num_stages
        super().__init__(module, module.stage, count, local.device, inputs, output, group=local.group)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.number = fwd_chunk_id
        with self.module.step.recorded(self.module.stage, fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward(super().backward_one_chunk, "backward", bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward(super().backward_weight_one_chunk, "weights", bwd_chunk_id, *args, **kwargs)

    def _backward(self, compute: Callable, kind: str, number: int, *args: Any, **kwargs: Any) -> None:
        step = self.module.step
        with step.recorded(self.module.stage, number, kind), torch.autocast(self.device.type, enabled=False):
            compute(number, *args, **kwargs)
            step.after_backward(self.module.stage)


class _Tied(torch.autograd.Function):
    """Returns a tensor as it is; another one gets a gradient of zeros, which torch's stage expects of every input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.other = torch.empty_like(other, device="meta"), other.device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        like, device = ctx.other
        return grad, torch.zeros_like(like, device=device)
