"""Runs the stages of one rank: forward only, or forward and backward in a schedule's order."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from strategies.base.stages import chained
from strategies.pipeline.buffers import Layout, Packing
from strategies.pipeline.microbatches import PipelineStep, last_output, stage_tensors
from strategies.pipeline.schedules import LocalSchedule, LocalStages
from strategies.pipeline.states import unchanged

MAX_SCHEDULES = 8  # kept with their memory, one for each layout of inputs, such as sequences of several lengths
Layouts = dict[int, list[Layout]]  # of each stage's inputs


class PipelineRunner:
    """Runs this rank's stages."""

    def __init__(self, local: LocalStages) -> None:
        self.local, self.rank_of = local, local.assignment.rank_of
        self.group, self.device = local.group, local.device
        self._schedules: dict[Any, LocalSchedule] = {}

    def forward(self, step: PipelineStep) -> Layouts:
        """Send micro-batches forward; returns the layouts of inputs of this rank's stages and of those that follow."""
        layouts: Layouts = {}
        kept: dict[int, tuple[Tensor, ...]] = {}  # for this rank's next stage, by micro-batch
        sent: list[tuple[Any, Tensor]] = []
        for stage, modules in self.local.own.items():
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
                if self.rank_of[stage + 1] == self.local.rank:
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
            if (target := self.rank_of[stage]) != self.local.rank:
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
        if is_source := self.local.rank == source:
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
        trained = tuple(p.requires_grad for stage in self.local.modules for m in stage for p in m.parameters())
        largest = max(step.microbatches, key=lambda piece: piece.rows)
        schedule = self._schedules.pop((shapes, trained), None)
        if schedule is None or schedule.capacity < largest.rows:
            trial = PipelineStep([largest])  # sent forward to see the layouts
            with unchanged(itertools.chain(*self.local.own.values()), self.device):
                layouts = self.forward(trial)
            schedule = LocalSchedule(self.local, layouts, self.broadcast_output(trial)[1], max(largest.rows, 1))
        self._schedules[shapes, trained] = schedule
        if len(self._schedules) > MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return schedule
