"""torch's pipeline schedules, run over the stages of one rank."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from strategies.parcels import UNIT, Layout, Packing
from strategies.stages import chained


class Event(NamedTuple):
    """What a rank computed when.

    Attributes:
        stage: number of the stage.
        microbatch: number of the micro-batch.
        kind: "forward", "backward", or "weights" where a schedule computes their gradients apart.
        start: seconds of the machine's monotonic clock.
        stop: likewise.
    """

    stage: int
    microbatch: int
    kind: str
    start: float
    stop: float


@dataclass
class MicroBatch:
    """Some rows of a batch.

    Attributes:
        rows: how many; with none, nothing is computed.
        inputs: what the first stage is called with.
        loss: from the last stage's output to a scalar, weighted as it counts; None to go forward only.
        context: in which every stage computes it.
    """

    rows: int
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor] | None
    context: Callable[[], AbstractContextManager]


def _ignore(*_: int) -> None:
    pass


@dataclass
class Step:
    """A batch on its way down the pipeline.

    Attributes:
        microbatches: in order.
        computed: called with the stage when gradients of its parameters are there.
        went_forward: called with stage and micro-batch when the stage has computed it.
        outputs: by micro-batch, what the last stage gave.
        losses: by micro-batch, on the last stage.
        events: what was computed when.
    """

    microbatches: Sequence[MicroBatch]
    computed: Callable[[int], None] = _ignore
    went_forward: Callable[[int, int], None] = _ignore
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def recorded(self, stage: int, number: int, kind: str) -> Iterator[None]:
        """Note when the block is computed; on a GPU that is when its kernels are queued."""
        start = time.perf_counter()
        yield
        self.events.append(Event(stage, number, kind, start, time.perf_counter()))


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


class Form(NamedTuple):
    """What an output looks like: a tree with tensors for leaves."""

    spec: TreeSpec
    others: dict[int, Any]
    layouts: list[Layout]

    @classmethod
    def of(cls, output: Any) -> "Form":
        """The form of an output."""
        leaves, spec = tree_flatten(output)
        others = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        return cls(spec, others, [Layout.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)])

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with these tensors."""
        rest = iter(tensors)
        count = len(self.layouts) + len(self.others)
        return tree_unflatten([self.others[i] if i in self.others else next(rest) for i in range(count)], self.spec)


class Line:
    """This rank's part of the pipeline: its stages, and what it sends to whom.

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
        self._runs: dict[Any, Run] = {}

    # Forward only

    def forward(self, step: Step) -> dict[int, list[Layout]]:
        """Send micro-batches through all stages, one stage after the other; the outputs come to all ranks.

        Returns:
            Of each of this rank's stages the layouts of what it takes; the first stage's are not asked for.
        """
        taken: dict[int, list[Layout]] = {}
        carried: dict[int, tuple[Tensor, ...]] = {}
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for stage in self.mine:
            given: list[Layout] = []
            for number, piece in enumerate(step.microbatches):
                x = piece.inputs
                if stage > 0:
                    if number == 0:
                        taken[stage] = self._announced(stage, carried)
                    x = self._received(stage, taken[stage], piece.rows, carried.pop(number, None))
                with step.recorded(stage, number, "forward"), piece.context():
                    y = chained(self.stages[stage], x)
                step.went_forward(stage, number)
                if stage == self.plan.num_stages - 1:
                    step.outputs[number] = tree_map(_detached, y)
                    continue
                tensors = travelling(y, self.stages[stage][-1], piece.rows)
                if number == 0:
                    given = [Layout.of(t) for t in tensors]
                    self._announce(stage, given)
                if self.plan.rank_of[stage + 1] == self.rank:
                    carried[number] = tensors
                else:
                    parcel = Packing(given, piece.rows).bare([t.detach() for t in tensors])
                    sent.append((dist.isend(parcel, group=self.group, group_dst=self.plan.rank_of[stage + 1]), parcel))
        for work, _ in sent:
            if work is not None:
                work.wait()
        return taken

    def _announce(self, stage: int, layouts: list[Layout]) -> None:
        target = self.plan.rank_of[stage + 1]
        if target != self.rank:
            dist.send_object_list([layouts], group=self.group, group_dst=target, device=self.device)

    def _announced(self, stage: int, carried: dict[int, tuple[Tensor, ...]]) -> list[Layout]:
        source = self.plan.rank_of[stage - 1]
        if source == self.rank:
            return [Layout.of(t) for t in carried[0]]
        header: list[Any] = [None]
        dist.recv_object_list(header, group=self.group, group_src=source, device=self.device)
        return header[0]

    def _received(
        self, stage: int, layouts: list[Layout], rows: int, carried: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        if carried is None:
            packing = Packing(layouts, rows)
            parcel = torch.empty(packing.units, dtype=UNIT, device=self.device)
            dist.recv(parcel, group=self.group, group_src=self.plan.rank_of[stage - 1])
            carried = tuple(packing.opened(parcel, rows))
        tensors = [t.detach() for t in carried]
        if torch.is_grad_enabled():  # clones of leaves, as layers may work in place
            pairs = zip(tensors, layouts, strict=True)
            return tuple(t.requires_grad_(layout.differentiable).clone() for t, layout in pairs)
        return tuple(tensors)

    # What the last stage gave

    def joined(self, step: Step, form: Form | None = None) -> tuple[Any, Form]:
        """The last stage's outputs of all micro-batches together, on all ranks.

        Args:
            step: that has been run.
            form: what they look like, if that is known already; else the last stage's rank says it.

        Returns:
            The outputs, and what they look like.
        """
        source = self.plan.rank_of[-1]
        rows = sum(piece.rows for piece in step.microbatches)
        output = None
        if self.rank == source:
            present = [step.outputs[n] for n, piece in enumerate(step.microbatches) if n in step.outputs]
            output = tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *present)
        if form is None:
            header = [Form.of(output) if self.rank == source else None]
            dist.broadcast_object_list(header, group=self.group, group_src=source, device=self.device)
            form = header[0]
        assert form is not None
        packing = Packing(form.layouts, rows)
        parcel = torch.empty(packing.units, dtype=UNIT, device=self.device)
        if output is not None:
            parcel = packing.bare([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
        dist.broadcast(parcel, group=self.group, group_src=source)
        return form.filled(packing.opened(parcel, rows)), form

    def from_last(self, value: Tensor) -> Tensor:
        """A scalar of the last stage's rank, on all ranks."""
        value = value.to(self.device)
        dist.broadcast(value, group=self.group, group_src=self.plan.rank_of[-1])
        return value

    # Training

    def train(self, step: Step) -> Any:
        """Send micro-batches forward and backward as the schedule says; the outputs, together, come to all ranks."""
        run = self._run(step)
        run.step(step)
        if not any(piece.rows for piece in step.microbatches):
            return run.form.filled([layout.empty(self.device) for layout in run.form.layouts])
        return self.joined(step, run.form)[0]

    def _run(self, step: Step) -> "Run":
        key = tuple((tuple(x.shape[1:]), x.dtype) for x in step.microbatches[0].inputs)
        capacity = max(piece.rows for piece in step.microbatches)
        if key not in self._runs or self._runs[key].capacity < capacity:
            self._runs[key] = self._tried(next(piece for piece in step.microbatches if piece.rows == capacity))
        return self._runs[key]

    def _tried(self, piece: MicroBatch) -> "Run":
        """Send one micro-batch forward to see what travels; it leaves no trace."""
        buffers = [b for stage in self.mine for m in self.stages[stage] for b in m.buffers()]
        before = [b.clone() for b in buffers]
        step = Step([piece])
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            taken = self.forward(step)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)
        _, form = self.joined(step)
        return Run(self, taken, form, max(piece.rows, 1))


class Run:
    """A schedule over this rank's stages, for inputs of one kind.

    Args:
        line: of this rank.
        taken: layouts of what its stages take.
        form: of the last stage's output.
        capacity: the most rows of a micro-batch.
    """

    def __init__(self, line: Line, taken: dict[int, list[Layout]], form: Form, capacity: int) -> None:
        self.form, self.capacity = form, capacity
        plan = line.plan
        packings = {stage: Packing(layouts, capacity) for stage, layouts in taken.items()}
        packings |= self._given(line, packings, capacity)
        self._parts = [Part(stage, line, packings.get(stage), packings.get(stage + 1)) for stage in line.mine]
        stages = [_Stage(part, line) for part in self._parts]
        multi = issubclass(plan.kind, PipelineScheduleMulti)
        args = stages if multi else stages[0]
        self._schedule = plan.kind(args, plan.num_microbatches, loss_fn=_the_loss, scale_grads=False)

    def _given(self, line: Line, taken: dict[int, Packing], capacity: int) -> dict[int, Packing]:
        """Packings of what the stages behind this rank's take."""
        plan = line.plan
        everyone: list[Any] = [None] * plan.ranks
        dist.all_gather_object(everyone, {stage: packing.layouts for stage, packing in taken.items()}, group=line.group)
        layouts = {stage: found for part in everyone for stage, found in part.items()}
        return {stage + 1: Packing(layouts[stage + 1], capacity) for stage in line.mine if stage + 1 in layouts}

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

    def __init__(self, stage: int, line: Line, taken: Packing | None, given: Packing | None) -> None:
        super().__init__()
        self.stage, self.taken, self.given, self.device = stage, taken, given, line.device
        self.layers = nn.ModuleList(line.stages[stage])
        self.step, self.number = Step([]), 0
        self.is_last = stage == line.plan.num_stages - 1

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
            out = self._loss(piece, y) if self.given is None else self._packed(piece, y, self.given, source)
        if self.taken is not None and not self.taken.differentiable:
            return _Tied.apply(out, source)
        return out

    def _empty(self) -> Tensor:
        if self.given is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.zeros(self.given.units, dtype=UNIT, device=self.device)

    def _packed(self, piece: MicroBatch, y: Any, given: Packing, source: Tensor) -> Tensor:
        return given.pack(travelling(y, self.layers[-1], piece.rows), source)

    def _loss(self, piece: MicroBatch, y: Any) -> Tensor:
        assert piece.loss is not None
        self.step.outputs[self.number] = tree_map(_detached, y)
        loss = piece.loss(y)
        self.step.losses[self.number] = loss.detach()
        return loss.double()  # a type that every loss fits in without rounding


class _Stage(PipelineStage):
    """torch's stage, which says which micro-batch it computes and when its gradients are there."""

    def __init__(self, part: Part, line: Line) -> None:
        self.part = part
        taken = (
            () if part.taken is None else torch.empty(part.taken.units, dtype=UNIT, device="meta", requires_grad=True)
        )
        given = part._empty().to("meta").requires_grad_()
        plan = line.plan
        super().__init__(part, part.stage, plan.num_stages, line.device, taken, given, group=line.group)

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


def travelling(output: Any, layer: nn.Module, rows: int) -> tuple[Tensor, ...]:
    """The tensors that a stage gives to the next.

    Raises:
        TypeError: it gives something else.
        ValueError: tensors whose first dimension is not the batch's.
    """
    tensors = output if type(output) is tuple else (output,)
    what = f"the stage that ends with {type(layer).__name__}"
    if wrong := [type(x).__name__ for x in tensors if not isinstance(x, Tensor)]:
        raise TypeError(f"{what}: expected a tensor or a tuple of tensors for the next stage, got {wrong[0]}")
    if uneven := [tuple(x.shape) for x in tensors if not x.dim() or len(x) != rows]:
        raise ValueError(f"{what}: expected tensors with the batch's {rows} rows first, got one of {uneven[0]}")
    return tensors


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _the_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output
