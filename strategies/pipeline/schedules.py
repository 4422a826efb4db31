"""torch's pipeline schedules, run over the stages of one rank."""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from strategies.base.stages import chained
from strategies.pipeline.buffers import UNIT, Layout, Packing
from strategies.pipeline.microbatches import Form, MicroBatch, Step, given, travelling


class Plan:
    """Which stages a rank has under a schedule.

    Args:
        schedule: torch's name of it, in any letters.
        ranks: of the pipeline.
        stages_per_rank: stages that each holds; None for what the schedule needs, at least.
        num_microbatches: into which a batch is cut.

    Raises:
        ValueError: the schedule can't be run so, in torch's words.
    """

    def __init__(self, schedule: str, ranks: int, stages_per_rank: int | None, num_microbatches: int) -> None:
        self.kind = get_schedule_class(schedule)
        self.num_microbatches, self.ranks = num_microbatches, ranks
        multi = issubclass(self.kind, PipelineScheduleMulti)
        self.stages_per_rank = stages_per_rank or (2 if multi else 1)
        if not multi and self.stages_per_rank != 1:
            raise ValueError(f"{schedule} has one stage on each rank")
        self.num_stages = ranks * self.stages_per_rank
        stand_ins = [SimpleNamespace(num_stages=self.num_stages, group_size=ranks, group_rank=0, stage_index=i,
                     is_first=False, is_last=False, submod=None) for i in range(self.stages_per_rank)]  # fmt: skip
        tried = self.kind(stand_ins if multi else stand_ins[0], num_microbatches, loss_fn=_the_loss)
        places = getattr(tried, "stage_index_to_group_rank", None) or {i: i for i in range(ranks)}
        self.rank_of = [places[stage] for stage in range(self.num_stages)]

    def stages_of(self, rank: int) -> list[int]:
        """The numbers of a rank's stages."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]


class Place:
    """A rank in its pipeline.

    Attributes:
        rank: in the pipeline.
        mine: the numbers of its stages.

    Args:
        plan: which stages are whose.
        stages: the modules of every stage; only this rank's are called.
        group: the ranks of this pipeline.
        device: where this rank computes.
    """

    def __init__(
        self, plan: Plan, stages: Sequence[Sequence[nn.Module]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.plan, self.stages, self.group, self.device = plan, stages, group, device
        self.rank = dist.get_rank(group)
        self.mine = plan.stages_of(self.rank)


class Run:
    """A schedule over this rank's stages, for inputs of one kind.

    Args:
        place: of this rank.
        taken: layouts of what its stages take.
        form: of the last stage's output.
        capacity: the most rows of a micro-batch.
    """

    def __init__(self, place: Place, taken: dict[int, list[Layout]], form: Form, capacity: int) -> None:
        self.form, self.capacity = form, capacity
        plan = place.plan
        packings = {stage: Packing(layouts, capacity) for stage, layouts in taken.items()}
        packings |= self._given(place, packings, capacity)
        self._parts = [Part(stage, place, packings.get(stage), packings.get(stage + 1)) for stage in place.mine]
        stages = [_Stage(part, place) for part in self._parts]
        multi = issubclass(plan.kind, PipelineScheduleMulti)
        args = stages if multi else stages[0]
        self._schedule = plan.kind(args, plan.num_microbatches, loss_fn=_the_loss, scale_grads=False)

    def _given(self, place: Place, taken: dict[int, Packing], capacity: int) -> dict[int, Packing]:
        """Packings of what the stages behind this rank's take."""
        plan = place.plan
        everyone: list[Any] = [None] * plan.ranks
        dist.all_gather_object(
            everyone, {stage: packing.layouts for stage, packing in taken.items()}, group=place.group
        )
        layouts = {stage: found for part in everyone for stage, found in part.items()}
        return {stage + 1: Packing(layouts[stage + 1], capacity) for stage in place.mine if stage + 1 in layouts}

    def step(self, step: Step) -> None:
        """Run it over the micro-batches.

        Raises:
            Exception: whatever a stage has raised.
        """
        for part in self._parts:
            part.step = step
        torch_says = logging.getLogger("torch.distributed.pipelining.schedules")
        quiet, torch_says.disabled = torch_says.disabled, True  # it prints the whole schedule where a stage fails
        try:
            self._schedule.step(target=torch.zeros(len(step.microbatches)), return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None
        finally:
            torch_says.disabled = quiet
            for part in self._parts:
                part.step = Step([])


class Part(nn.Module):
    """A stage as torch's schedules see it: from a parcel to a parcel; the last one's output is the loss.

    Attributes:
        step: the batch that is on its way.
        number: of the micro-batch that is computed now.
    """

    def __init__(self, stage: int, place: Place, taken: Packing | None, sent: Packing | None) -> None:
        super().__init__()
        self.stage, self.taken, self.sent, self.device = stage, taken, sent, place.device
        self.layers = nn.ModuleList(place.stages[stage])
        self.step, self.number = Step([]), 0
        self.is_last = stage == place.plan.num_stages - 1

    def forward(self, parcel: Tensor | None = None) -> Tensor:
        """Compute a micro-batch."""
        piece = self.step.microbatches[self.number]
        source = torch.zeros(1, dtype=UNIT, device=self.device, requires_grad=True) if parcel is None else parcel
        if not piece.rows:
            return _Tied.apply(self._empty(), source)
        x = piece.inputs
        if self.taken is not None and parcel is not None:
            x = self.taken.unpack(parcel, piece.rows)
        with piece.context():
            y = chained(self.layers, x)
            self.step.went_forward(self.stage, self.number)
            out = self._loss(piece, y) if self.sent is None else self._packed(piece, y, self.sent, source)
        if self.taken is not None and not self.taken.differentiable:
            return _Tied.apply(out, source)
        return out

    def _empty(self) -> Tensor:
        if self.sent is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.zeros(self.sent.units, dtype=UNIT, device=self.device)

    def _packed(self, piece: MicroBatch, y: Any, sent: Packing, source: Tensor) -> Tensor:
        return sent.pack(travelling(y, self.layers[-1], piece.rows), source)

    def _loss(self, piece: MicroBatch, y: Any) -> Tensor:
        assert piece.loss is not None
        self.step.outputs[self.number] = given(y, self.layers[-1], piece.rows)
        loss = piece.loss(y)
        self.step.losses[self.number] = loss.detach()
        return loss.double()  # a type that every loss fits in without rounding


class _Stage(PipelineStage):
    """torch's stage, which says which micro-batch it computes and when its gradients are there."""

    def __init__(self, part: Part, place: Place) -> None:
        self.part = part
        taken = (
            () if part.taken is None else torch.empty(part.taken.units, dtype=UNIT, device="meta", requires_grad=True)
        )
        sent = part._empty().to("meta").requires_grad_()
        plan = place.plan
        super().__init__(part, part.stage, plan.num_stages, place.device, taken, sent, group=place.group)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.part.number = fwd_chunk_id
        with self.part.step.recorded(self.part.stage, fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward(super().backward_one_chunk, "backward", bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward(super().backward_weight_one_chunk, "weights", bwd_chunk_id, *args, **kwargs)

    def _backward(self, compute: Callable, kind: str, number: int, *args: Any, **kwargs: Any) -> None:
        step = self.part.step
        with step.recorded(self.part.stage, number, kind), torch.autocast(self.device.type, enabled=False):
            compute(number, *args, **kwargs)
            step.computed(self.part.stage)


class _Tied(torch.autograd.Function):
    """A tensor as it is, with a gradient of zeros for another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.other = other.shape, other.dtype, other.device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device = ctx.other
        return grad, torch.zeros(shape, dtype=dtype, device=device)


def _the_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output
