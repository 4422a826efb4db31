"""Runs the stages of one rank on the micro-batches of a batch: forward only, or both ways in a schedule's order."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from apprentice.contract import Gathers
from apprentice.private import tree_leaves, tree_map, tree_map_only
from strategies.base.stages import apply_modules, check_output, stage_tensors
from strategies.pipeline.buffers import UNIT, Layout, Packing
from strategies.pipeline.cutting import StageAssignment
from strategies.pipeline.states import preserve_state

MAX_SCHEDULES = 8  # kept with their memory, one for each layout of inputs, such as sequences of several lengths
Layouts = dict[int, list[Layout]]  # of each stage's inputs


class Event(NamedTuple):
    """When a rank computed a micro-batch."""

    stage: int
    microbatch: int
    kind: str  # "forward", "backward", or "weights" if a schedule computes their gradients separately
    start: float  # seconds of the machine's monotonic clock; on a GPU, when kernels are queued
    stop: float


@dataclass
class MicroBatch:
    """Some rows of a batch."""

    rows: int  # 0: stages compute nothing
    inputs: tuple[Tensor, ...]  # of the first stage
    request: object  # of every stage, beside tensors; None for none
    loss: Callable[[Any], Tensor] | None  # from the last stage's output to a weighted scalar; None for forward only
    context: Callable[[], AbstractContextManager[None]]  # each stage enters it


@dataclass
class PipelineStep:
    """One pass of a batch through the pipeline."""

    microbatches: Sequence[MicroBatch]
    after_backward: Callable[[int], None] = lambda _stage: None
    after_forward: Callable[[int, int], None] = lambda _stage, _microbatch: None
    outputs: dict[int, Any] = field(default_factory=dict)  # the last stage's, by micro-batch
    losses: dict[int, Tensor] = field(default_factory=dict)  # likewise
    events: list[Event] = field(default_factory=list)  # of this rank

    @contextmanager
    def record(self, stage: int, number: int, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.events.append(Event(stage, number, kind, start, time.perf_counter()))


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


class _StageModule(nn.Module):
    """A stage for torch's schedules: from a buffer to a buffer; the last stage returns the loss."""

    def __init__(self, stage: int, runner: "PipelineRunner", inputs: Packing | None, outputs: Packing | None) -> None:
        super().__init__()
        self.stage, self.runner, self.inputs, self.outputs = stage, runner, inputs, outputs
        self.layers = nn.ModuleList(runner.local_stages[stage])
        # Then a rank computes empty micro-batches too, as others may have rows.
        self.gathers = any(isinstance(m, Gathers) and m.gathers for m in self.layers.modules())
        self.number = 0  # of the current micro-batch

    def forward(self, buffer: Tensor | None = None) -> Tensor:
        out: Tensor
        step, device = self.runner.step, self.runner.device
        piece = step.microbatches[self.number]
        source = torch.zeros(1, dtype=UNIT, device=device, requires_grad=True) if buffer is None else buffer
        if not piece.rows and (piece.loss is None or not self.gathers):
            out = _Tied.apply(self.zeros(device), source)
            return out
        x = piece.inputs if self.inputs is None else self.inputs.unpack(source, piece.rows)
        with piece.context():
            y = apply_modules(self.layers, x, piece.request)
            step.after_forward(self.stage, self.number)
            if not piece.rows and self.outputs is None:
                sums = [x.double().sum() for x in tree_leaves(y) if isinstance(x, Tensor) and x.requires_grad]
                out = sum(sums, start=self.zeros(device))  # of no rows: 0, with the stage behind it
            elif self.outputs is None:
                assert piece.loss is not None
                check_output(y, self.layers[-1], piece.rows)
                step.outputs[self.number] = tree_map_only(Tensor, Tensor.detach, y)
                loss = piece.loss(y)
                step.losses[self.number] = loss.detach()
                out = loss.double()
            else:
                out = self.outputs.pack(stage_tensors(y, self.layers[-1], piece.rows), source)
        if self.inputs is not None and not self.inputs.differentiable:
            out = _Tied.apply(out, source)
        return out

    def zeros(self, device: torch.device | str) -> Tensor:
        """Return an output of zeros; the loss is float64, into which every loss fits without rounding."""
        if self.outputs is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.zeros(self.outputs.units, dtype=UNIT, device=device)


class _RecordedStage(PipelineStage):
    """torch's stage. It tells the module the micro-batch's number, and the step what has been computed."""

    def __init__(self, module: _StageModule) -> None:
        self.module, self.runner = module, module.runner
        inputs = (
            torch.empty(module.inputs.units, dtype=UNIT, device="meta", requires_grad=True) if module.inputs else ()
        )
        output, count = module.zeros("meta").requires_grad_(), len(self.runner.modules)
        super().__init__(module, module.stage, count, self.runner.device, inputs, output, group=self.runner.group)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.number = fwd_chunk_id
        with self.runner.step.record(self.module.stage, fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward(super().backward_one_chunk, "backward", bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward(super().backward_weight_one_chunk, "weights", bwd_chunk_id, *args, **kwargs)

    def _backward(self, compute: Callable[..., None], kind: str, number: int, *args: Any, **kwargs: Any) -> None:
        step = self.runner.step
        with step.record(self.module.stage, number, kind), torch.autocast(self.device.type, enabled=False):
            compute(number, *args, **kwargs)
            step.after_backward(self.module.stage)


class LocalSchedule(NamedTuple):
    """A schedule over this rank's stages, for one layout of the stages' inputs and at most `capacity` rows."""

    schedule: Any  # torch's
    form: Any  # of the last stage's output
    capacity: int


class PipelineRunner:
    """Runs this rank's stages; `modules` are those of every stage, and `group` has the ranks of this pipeline."""

    def __init__(
        self, assignment: StageAssignment, modules: Sequence[Sequence[nn.Module]], group: Any, device: torch.device
    ) -> None:
        self.assignment, self.modules, self.group, self.device = assignment, modules, group, device
        self.rank, self.rank_of = dist.get_rank(group), assignment.rank_of
        self.step = PipelineStep([])  # the current one, in training
        self.local_stages = {stage: modules[stage] for stage, rank in enumerate(self.rank_of) if rank == self.rank}
        self._schedules: dict[Any, LocalSchedule] = {}

    def forward(self, step: PipelineStep) -> Layouts:
        """Send micro-batches forward; returns the layouts of inputs of this rank's stages and of those that follow."""
        layouts: Layouts = {}
        kept: dict[int, tuple[Tensor, ...]] = {}  # for this rank's next stage, by micro-batch
        messages: list[tuple[Any, Tensor]] = []  # with their buffers
        for stage, modules in self.local_stages.items():
            for number, piece in enumerate(step.microbatches):
                x = self._receive(stage, piece.rows, layouts, kept.pop(number, None)) if stage else piece.inputs
                with step.record(stage, number, "forward"), piece.context():
                    y = apply_modules(modules, x, piece.request)
                step.after_forward(stage, number)
                if stage == len(self.rank_of) - 1:
                    check_output(y, modules[-1], piece.rows)
                    step.outputs[number] = tree_map_only(Tensor, Tensor.detach, y)
                    continue
                tensors = stage_tensors(y, modules[-1], piece.rows)
                packing = self._make_packing(stage + 1, tensors, layouts)
                if self.rank_of[stage + 1] == self.rank:
                    kept[number] = tensors
                else:
                    buffer = packing.pack_detached([t.detach() for t in tensors])
                    messages.append((dist.isend(buffer, group=self.group, group_dst=self.rank_of[stage + 1]), buffer))
        for work, _ in messages:
            work.wait()
        return layouts

    def _make_packing(self, stage: int, tensors: tuple[Tensor, ...], layouts: Layouts) -> Packing:
        """Make a packing of a stage's inputs; the first micro-batch's layouts are sent to that stage's rank."""
        if stage not in layouts:
            layouts[stage] = [Layout.of(t) for t in tensors]
            if (target := self.rank_of[stage]) != self.rank:
                dist.send_object_list([layouts[stage]], group=self.group, group_dst=target, device=self.device)
        packing = Packing(layouts[stage], len(tensors[0]))
        packing.check(tensors)
        return packing

    def _receive(self, stage: int, rows: int, layouts: Layouts, kept: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Take the tensors of the previous stage, kept on this rank or received."""
        source = self.rank_of[stage - 1]
        if stage not in layouts:
            header: list[Any] = [None]
            dist.recv_object_list(header, group=self.group, group_src=source, device=self.device)
            layouts[stage] = header[0]
        if kept is None:
            packing = Packing(layouts[stage], rows)
            buffer = torch.empty(packing.units, dtype=UNIT, device=self.device)
            dist.recv(buffer, group=self.group, group_src=source)
            kept = tuple(packing.views(buffer, rows))
        tensors = [t.detach() for t in kept]
        if torch.is_grad_enabled():  # clones of leaves, as layers may work in place
            pairs = zip(tensors, layouts[stage], strict=True)
            return tuple(t.requires_grad_(layout.differentiable).clone() for t, layout in pairs)
        return tuple(tensors)

    def broadcast_output(self, step: PipelineStep, form: Any = None) -> tuple[Any, Any]:
        """Concatenate the last stage's outputs on all ranks; also returns their form, a tree with layouts for tensors.

        The last stage's rank sends the form, unless `form` has only layouts as leaves: others may change.
        """
        source, output = self.rank_of[-1], None
        if is_source := self.rank == source:
            present = [step.outputs[number] for number in sorted(step.outputs)]
            output = tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *present)
        if not all(isinstance(leaf, Layout) for leaf in tree_leaves(form)):
            header = [tree_map_only(Tensor, Layout.of, output)]
            dist.broadcast_object_list(header, group=self.group, group_src=source, device=self.device)
            form = header[0]
        rows = sum(piece.rows for piece in step.microbatches)
        packing = Packing([leaf for leaf in tree_leaves(form) if isinstance(leaf, Layout)], rows)
        if is_source:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            packing.check(tensors)
            buffer = packing.pack_detached(tensors)
        else:
            buffer = torch.empty(packing.units, dtype=UNIT, device=self.device)
        dist.broadcast(buffer, group=self.group, group_src=source)
        received = iter(packing.views(buffer, rows))
        return tree_map_only(Layout, lambda _: next(received), form), form

    def broadcast_loss(self, step: PipelineStep) -> float:
        """Return the sum of the last stage's losses on all ranks."""
        loss = sum(loss.item() for loss in step.losses.values())
        total = torch.tensor(loss, dtype=torch.float64, device=self.device)
        dist.broadcast(total, group=self.group, group_src=self.rank_of[-1])
        return total.item()

    def train(self, step: PipelineStep) -> Any:
        """Send micro-batches forward and backward; returns the last stage's outputs, on all ranks."""
        schedule, form, _ = self._prepare_schedule(step)
        torch_logger = logging.getLogger("torch.distributed.pipelining.schedules")
        before, torch_logger.disabled = torch_logger.disabled, True  # it prints the whole schedule if a stage fails
        self.step = step
        try:
            schedule.step(target=torch.zeros(len(step.microbatches)), return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None
        finally:
            torch_logger.disabled, self.step = before, PipelineStep([])
        if any(piece.rows for piece in step.microbatches):
            return self.broadcast_output(step, form)[0]
        return tree_map_only(Layout, lambda x: torch.empty(0, *x.row, dtype=x.dtype, device=self.device), form)

    def _prepare_schedule(self, step: PipelineStep) -> LocalSchedule:
        """Return the schedule for the step's inputs, the latest last in `_schedules`."""
        shapes = tuple((tuple(x.shape[1:]), x.dtype) for x in step.microbatches[0].inputs)
        trained = tuple(p.requires_grad for stage in self.modules for m in stage for p in m.parameters())
        largest = max(step.microbatches, key=lambda piece: piece.rows)
        schedule = self._schedules.pop((shapes, trained), None)
        if schedule is None or schedule.capacity < largest.rows:
            trial = PipelineStep([largest])  # goes forward to show the layouts
            with preserve_state(itertools.chain(*self.local_stages.values()), self.device):
                layouts = self.forward(trial)
            capacity = max(largest.rows, 1)
            packings = {stage: Packing(inputs, capacity) for stage, inputs in layouts.items()}
            modules = [_StageModule(i, self, packings.get(i), packings.get(i + 1)) for i in self.local_stages]
            torch_schedule = self.assignment.schedule_of(
                [_RecordedStage(module) for module in modules], scale_grads=False
            )
            schedule = LocalSchedule(torch_schedule, self.broadcast_output(trial)[1], capacity)
        self._schedules[shapes, trained] = schedule
        if len(self._schedules) > MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return schedule
