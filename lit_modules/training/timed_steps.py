"""Steps of one student of a distillation by itself, to measure its cost."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from apprentice.batch import Batch
from lit_modules.nets.outputs import Outputs

if TYPE_CHECKING:
    from lit_modules.distillation import Distillation


def timed_steps(module: "Distillation", run: str, batch: Batch) -> dict[float, Callable[[], Tensor]]:
    """Return steps of one copy of a run's student, for each phase of its training, by where it begins.

    The outputs of the teacher and of peers are computed beforehand.
    """
    student = copy.deepcopy(module.students[run]).train()
    if module.optimization.compiled:
        student.net.compile(dynamic=False)
    parts, taught = _batches(module, run, batch), list[Outputs | None]()
    for part in parts:
        beside, uses = module.outputs.beside(part._replace(starts=None)), student.objective.uses_teacher
        taught.append(module.cache.reduce(module.ask_teacher(part.inputs, "all", beside), part) if uses else None)
    with torch.no_grad():  # of copies, as running statistics change
        peers = {peer: copy.deepcopy(module.students[peer])(batch.inputs) for peer in student.objective.peers}

    def step(progress: float) -> Tensor:
        student.zero_grad()
        loss = torch.zeros((), device=module.device)
        for part, teacher in zip(_batches(module, run, batch), taught, strict=True):
            beside = module.outputs.beside(part)
            outputs = {run: module.outputs.run_student(run, student, part.inputs, beside, "losses"), **peers}
            context = replace(module.context(part), progress=progress)
            losses = module.outputs.losses({run: student}, outputs, teacher, part, context)
            loss = loss + losses[run].part
        return loss

    return {progress: partial(step, progress) for progress in student.objective.phases()}


def _batches(module: "Distillation", run: str, batch: Batch) -> list[Batch]:
    """Return the batches that a student learns from in such a step."""
    return [part for extra in module.extras for part in extra.timed_batches(module, run, batch)] or [batch]
