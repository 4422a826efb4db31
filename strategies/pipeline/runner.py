"""Runs the stages of one rank: forward only, or forward and backward in a schedule's order."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from strategies.base.stages import chained
from strategies.pipeline.buffers import UNIT, Layout, Packing
from strategies.pipeline.cutting import StageAssignment
from strategies.pipeline.microbatches import PipelineStep, last_output, stage_tensors
from strategies.pipeline.states import unchanged

MAX_SCHEDULES = 8  # kept with their memory, one for each layout of inputs, such as sequences of several lengths
Layouts = dict[int, list[Layout]]  # of each stage's inputs


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

    def __init__(self, stage: int, runner: "PipelineRunner", received: Packing | None, sent: Packing | None) -> None:
        super().__init__()
        self.stage, self.received, self.sent, self.device = stage, received, sent, runner.device
        self.layers = nn.ModuleList(runner.own[stage])
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

    def __init__(self, module: _StageModule, runner: "PipelineRunner") -> None:
        self.module = module
        inputs = module.received.empty("meta").requires_grad_() if module.received else ()
        output = module.zeros("meta").requires_grad_()
        count = runner.assignment.num_stages
        super().__init__(module, module.stage, count, runner.device, inputs, output, group=runner.group)

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


class LocalSchedule:
    """A schedule over this rank's stages, for one layout of the stages' inputs and at most `capacity` rows."""

    def __init__(
        self, runner: "PipelineRunner", layouts: Mapping[int, Sequence[Layout]], form: Any, capacity: int
    ) -> None:
        self.form, self.capacity = form, capacity
        packings = {stage: Packing(found, capacity) for stage, found in layouts.items()}
        self._modules = [_StageModule(i, runner, packings.get(i), packings.get(i + 1)) for i in runner.own]
        stages = [_RecordedStage(module, runner) for module in self._modules]
        self._schedule = runner.assignment.schedule_of(stages, scale_grads=False)

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


class PipelineRunner:
    """Runs this rank's stages; `modules` are those of every stage, and `group` has the ranks of this pipeline."""

    def __init__(
        self, assignment: StageAssignment, modules: Sequence[Sequence[nn.Module]], group: Any, device: torch.device
    ) -> None:
        self.assignment, self.modules, self.group, self.device = assignment, modules, group, device
        self.rank, self.rank_of = dist.get_rank(group), assignment.rank_of
        self.own = {stage: modules[stage] for stage, rank in enumerate(self.rank_of) if rank == self.rank}
        self._schedules: dict[Any, LocalSchedule] = {}

    def forward(self, step: PipelineStep) -> Layouts:
        """Send micro-batches forward; returns the layouts of inputs of this rank's stages and of those that follow."""
        layouts: Layouts = {}
        kept: dict[int, tuple[Tensor, ...]] = {}  # for this rank's next stage, by micro-batch
        sent: list[tuple[Any, Tensor]] = []
        for stage, modules in self.own.items():
            for number, piece in enumerate(step.microbatches):
                x = self._inputs(stage, piece.rows, layouts, kept.pop(number, None)) if stage else piece.inputs
                with step.recorded(stage, number, "forward"), piece.context():
                    y = chained(modules, x)
                step.after_forward(stage, number)
                if stage == len(self.rank_of) - 1:
                    step.outputs[number] = last_output(y, modules[-1], piece.rows)
                    continue
                tensors = stage_tensors(y, modules[-1], piece.rows)
                packing = self._packing(stage + 1, tensors, layouts)
                if self.rank_of[stage + 1] == self.rank:
                    kept[number] = tensors
                else:
                    buffer = packing.pack_detached([t.detach() for t in tensors])
                    sent.append((dist.isend(buffer, group=self.group, group_dst=self.rank_of[stage + 1]), buffer))
        for work, _ in sent:
            work.wait()
        return layouts

    def _packing(self, stage: int, tensors: tuple[Tensor, ...], layouts: Layouts) -> Packing:
        """A packing of a stage's inputs; the first micro-batch's layouts are sent to that stage's rank."""
        if stage not in layouts:
            layouts[stage] = [Layout.of(t) for t in tensors]
            if (target := self.rank_of[stage]) != self.rank:
                dist.send_object_list([layouts[stage]], group=self.group, group_dst=target, device=self.device)
        packing = Packing(layouts[stage], len(tensors[0]))
        packing.check(tensors)
        return packing

    def _inputs(self, stage: int, rows: int, layouts: Layouts, kept: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """The tensors of the previous stage, kept on this rank or received."""
        source = self.rank_of[stage - 1]
        if stage not in layouts:
            header: list[Any] = [None]
            dist.recv_object_list(header, group=self.group, group_src=source, device=self.device)
            layouts[stage] = header[0]
        if kept is None:
            packing = Packing(layouts[stage], rows)
            buffer = packing.empty(self.device)
            dist.recv(buffer, group=self.group, group_src=source)
            kept = tuple(packing.views(buffer, rows))
        tensors = [t.detach() for t in kept]
        if torch.is_grad_enabled():  # clones of leaves, as layers may work in place
            pairs = zip(tensors, layouts[stage], strict=True)
            return tuple(t.requires_grad_(layout.differentiable).clone() for t, layout in pairs)
        return tuple(tensors)

    def broadcast_output(self, step: PipelineStep, form: Any = None) -> tuple[Any, Any]:
        """The last stage's outputs, concatenated, and their form: a tree with layouts for tensors.

        The last stage's rank sends the form, unless it is given and has no other leaves, which may change.
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
            buffer = packing.empty(self.device)
        dist.broadcast(buffer, group=self.group, group_src=source)
        received = iter(packing.views(buffer, rows))
        return tree_map_only(Layout, lambda _: next(received), form), form

    def broadcast_loss(self, step: PipelineStep) -> float:
        """The sum of the last stage's losses, on all ranks."""
        loss = sum(loss.item() for loss in step.losses.values())
        found = torch.tensor(loss, dtype=torch.float64, device=self.device)
        dist.broadcast(found, group=self.group, group_src=self.rank_of[-1])
        return found.item()

    def train(self, step: PipelineStep) -> Any:
        """Send micro-batches forward and backward; returns the last stage's outputs, on all ranks."""
        schedule = self._schedule(step)
        schedule.run(step)
        if any(piece.rows for piece in step.microbatches):
            return self.broadcast_output(step, schedule.form)[0]
        return tree_map_only(Layout, lambda x: torch.empty(0, *x.row, dtype=x.dtype, device=self.device), schedule.form)

    def _schedule(self, step: PipelineStep) -> LocalSchedule:
        """The schedule for the step's inputs, the latest last in `_schedules`."""
        shapes = tuple((tuple(x.shape[1:]), x.dtype) for x in step.microbatches[0].inputs)
        trained = tuple(p.requires_grad for stage in self.modules for m in stage for p in m.parameters())
        largest = max(step.microbatches, key=lambda piece: piece.rows)
        schedule = self._schedules.pop((shapes, trained), None)
        if schedule is None or schedule.capacity < largest.rows:
            trial = PipelineStep([largest])  # sent forward to see the layouts
            with unchanged(itertools.chain(*self.own.values()), self.device):
                layouts = self.forward(trial)
            schedule = LocalSchedule(self, layouts, self.broadcast_output(trial)[1], max(largest.rows, 1))
        self._schedules[shapes, trained] = schedule
        if len(self._schedules) > MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return schedule
