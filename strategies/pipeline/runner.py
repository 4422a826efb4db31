"""What one rank does for its pipeline: forward only, and forward and backward as a schedule says."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from strategies.base.stages import chained
from strategies.pipeline.buffers import UNIT, Layout, Packing
from strategies.pipeline.microbatches import Form, MicroBatch, Step, given, travelling
from strategies.pipeline.schedules import Place, Run

KEPT = 8  # kinds of inputs, as sequences of several lengths, for which a schedule with its memory is kept


class PipelineRunner:
    """The ranks of a pipeline in a row, as one of them sees it.

    Args:
        place: of this rank.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.plan, self.group, self.device = place, place.plan, place.group, place.device
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
        for stage in self.place.mine:
            layouts: list[Layout] = []
            for number, piece in enumerate(step.microbatches):
                x = piece.inputs
                if stage > 0:
                    if number == 0:
                        taken[stage] = self._announced(stage, carried)
                    x = self._received(stage, taken[stage], piece.rows, carried.pop(number, None))
                with step.recorded(stage, number, "forward"), piece.context():
                    y = chained(self.place.stages[stage], x)
                step.went_forward(stage, number)
                if stage == self.plan.num_stages - 1:
                    step.outputs[number] = given(y, self.place.stages[stage][-1], piece.rows)
                    continue
                tensors = travelling(y, self.place.stages[stage][-1], piece.rows)
                if number == 0:
                    layouts = [Layout.of(t) for t in tensors]
                    self._announce(stage, layouts)
                packing = Packing(layouts, piece.rows)
                packing.check(tensors)
                if self.plan.rank_of[stage + 1] == self.place.rank:
                    carried[number] = tensors
                else:
                    parcel = packing.bare([t.detach() for t in tensors])
                    sent.append((dist.isend(parcel, group=self.group, group_dst=self.plan.rank_of[stage + 1]), parcel))
        for work, _ in sent:
            if work is not None:
                work.wait()
        return taken

    def _announce(self, stage: int, layouts: list[Layout]) -> None:
        target = self.plan.rank_of[stage + 1]
        if target != self.place.rank:
            dist.send_object_list([layouts], group=self.group, group_dst=target, device=self.device)

    def _announced(self, stage: int, carried: dict[int, tuple[Tensor, ...]]) -> list[Layout]:
        source = self.plan.rank_of[stage - 1]
        if source == self.place.rank:
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
        if self.place.rank == source:
            present = [step.outputs[n] for n, piece in enumerate(step.microbatches) if n in step.outputs]
            output = tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *present)
        if form is None:
            header = [Form.of(output) if self.place.rank == source else None]
            dist.broadcast_object_list(header, group=self.group, group_src=source, device=self.device)
            form = header[0]
        assert form is not None
        packing = Packing(form.layouts, rows)
        parcel = torch.empty(packing.units, dtype=UNIT, device=self.device)
        if output is not None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            packing.check(tensors)
            parcel = packing.bare(tensors)
        dist.broadcast(parcel, group=self.group, group_src=source)
        return form.filled(packing.opened(parcel, rows)), form

    def from_last(self, value: float) -> float:
        """A number of the last stage's rank, on all ranks."""
        told = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(told, group=self.group, group_src=self.plan.rank_of[-1])
        return told.item()

    # Training

    def train(self, step: Step) -> Any:
        """Send micro-batches forward and backward as the schedule says; the outputs, together, come to all ranks."""
        run = self._run(step)
        run.step(step)
        if not any(piece.rows for piece in step.microbatches):
            return run.form.filled([layout.empty(self.device) for layout in run.form.layouts])
        return self.joined(step, None if run.form.others else run.form)[0]

    def _run(self, step: Step) -> Run:
        shapes = tuple((tuple(x.shape[1:]), x.dtype) for x in step.microbatches[0].inputs)
        trained = tuple(p.requires_grad for stage in self.place.stages for m in stage for p in m.parameters())
        capacity = max(piece.rows for piece in step.microbatches)
        run = self._runs.pop((shapes, trained), None)
        if run is None or run.capacity < capacity:
            run = self._tried(next(piece for piece in step.microbatches if piece.rows == capacity))
        self._runs[shapes, trained] = run  # the latest is the last
        if len(self._runs) > KEPT:
            del self._runs[next(iter(self._runs))]
        return run

    def _tried(self, piece: MicroBatch) -> Run:
        """Send one micro-batch forward to see what travels; it leaves no trace."""
        buffers = [b for stage in self.place.mine for m in self.place.stages[stage] for b in m.buffers()]
        before = [b.clone() for b in buffers]
        step = Step([piece])
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            taken = self.forward(step)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)
        _, form = self.joined(step)
        return Run(self.place, taken, form, max(piece.rows, 1))
