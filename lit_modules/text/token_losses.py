"""Losses of language models in chunks of tokens: the logits of all tokens are never held at once.

For each chunk of the tokens that count, the heads of teacher and students give logits, objectives their terms, and the
gradients of logits go into those of the head's inputs and weights at once: the forward makes the gradients, nothing is
computed twice, and of float32 numbers (tokens, V) there are those of a chunk alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apprentice.batch import Batch, label_mask
from lit_modules.nets.outputs import Outputs, logits_of
from lit_modules.objectives.base import Objective, Term, average_labelled, cross_entropy, weigh_classes
from lit_modules.objectives.context import StepContext
from lit_modules.training.student import CE, Losses, Student

BLOCK = 16  # tokens of a chunk whose terms are computed at once on a CPU: what lies between fits in its cache


class _Tokens(NamedTuple):
    """The n tokens of a batch (b, T) that count."""

    places: Tensor  # (n,) int64, their places among b * T
    labels: Tensor  # (n,)
    weights: Tensor  # (n,), the share of each one's loss in this rank's part of the global mean
    rows: Tensor  # (n,) int64, the row of each in the batch


def chunk_losses(
    students: Mapping[str, Student],
    outputs: Mapping[str, Outputs],
    teacher: Outputs | None,
    batch: Batch,
    context: StepContext,
    size: int,
) -> dict[str, Losses]:
    """Compute the losses of students, given the inputs of their heads, `size` tokens at a time."""
    names = list(students)
    tokens = _counted(batch)
    heads = [head for name in names if (head := outputs[name].hidden)]
    terms = _Terms([students[name] for name in names], tokens, context, batch)
    tensors = [x for h in heads for x in (h.inputs.flatten(0, 1)[tokens.places], h.weight, h.bias)]
    parts = _Chunks.apply(terms.of_chunk, _TeacherChunks(teacher, tokens), size, *tensors)
    return {name: Losses(parts[i], *terms.rows(i)) for i, name in enumerate(names)}


def _counted(batch: Batch) -> _Tokens:
    labels = batch.labels
    counts = label_mask(labels) if batch.label_weight is not None else torch.ones_like(labels, dtype=torch.bool)
    places = counts.flatten().nonzero().flatten()
    with torch.enable_grad():  # a mean is linear: its gradient is each token's weight
        values = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device, requires_grad=True)
        (weights,) = torch.autograd.grad(batch.mean(average_labelled(values, labels, batch.label_weight)), values)
    return _Tokens(places, labels.flatten()[places], weights.flatten()[places], places // max(labels.shape[1], 1))


class _TeacherChunks:
    """The teacher's outputs for a chunk of tokens, which all students share."""

    def __init__(self, outputs: Outputs | None, tokens: _Tokens) -> None:
        self.outputs, self.tokens = outputs, tokens

    def of_chunk(self, part: slice) -> Outputs | None:
        if self.outputs is None:
            return None
        places = self.tokens.places[part]
        if self.outputs.hidden:
            return Outputs(self.outputs.logits_at(places), {})
        return self.outputs.map(lambda x: x.flatten(0, 1)[places])


class _Terms:
    """The terms of students for chunks of tokens, whose values it keeps."""

    def __init__(self, students: list[Student], tokens: _Tokens, context: StepContext, batch: Batch) -> None:
        self.students, self.tokens, self.context, self.batch = students, tokens, context, batch
        self.values: list[dict[str, Tensor]] = [{} for _ in students]  # (b * T,) of each term
        self.weights: list[dict[str, float]] = [{} for _ in students]

    def of_chunk(self, i: int, logits: Tensor, teacher: Outputs | None, part: slice) -> Tensor:
        """Return the chunk's part of a student's loss, with the gradient of its logits (n, V)."""
        student, labels, rows = self.students[i], self.tokens.labels[part], self.tokens.rows[part]
        objective: Objective = student.objective
        index, numbers = self.batch.index[rows], self.batch.rows[rows]
        context = replace(self.context, index=index, rows=numbers, peers={}, counted=None)
        source = teacher.match_dtype(student.net) if teacher is not None and objective.uses_teacher else None
        terms = objective.terms(Outputs(logits, {}), source, labels, context)
        loss = logits.new_zeros(len(labels), dtype=torch.float32 if logits.dtype.itemsize < 4 else logits.dtype)
        ce = None
        for name, term in terms.items():
            values = self._weigh(term, labels)
            self._keep(i, name, values, part)
            self.weights[i][name] = term.weight
            ce = term.values.detach() if term.is_ce else ce
            loss = loss + values * term.weight if term.weight else loss
        self._keep(i, CE, cross_entropy(logits.detach(), labels) if ce is None else ce, part)
        return (loss * self.tokens.weights[part].to(loss.dtype)).sum()

    def _weigh(self, term: Term, labels: Tensor) -> Tensor:
        return weigh_classes(term.values, labels, self.batch.class_weights if term.class_weighted else None)

    def _keep(self, i: int, name: str, values: Tensor, part: slice) -> None:
        kept = self.values[i]
        if name not in kept:
            kept[name] = values.new_zeros(self.batch.labels.numel(), requires_grad=False)
        kept[name][self.tokens.places[part]] = values.detach()

    def rows(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a student's loss (b,) and the values of its terms (b,), with cross-entropies (b, T)."""
        labels, weight = self.batch.labels, self.batch.label_weight
        by_token = {name: values.view(labels.shape) for name, values in self.values[i].items()}
        ce = by_token.pop(CE)
        values = {name: average_labelled(x, labels, weight) for name, x in by_token.items()}
        total = sum((x * self.weights[i][name] for name, x in values.items()), start=torch.zeros(()))
        return total, {**values, CE: ce}


OfChunk = Callable[[int, Tensor, Outputs | None, slice], Tensor]


class _Chunks(torch.autograd.Function):
    """The losses of students, and gradients of the inputs and weights of their heads, which forward makes."""

    @staticmethod
    def forward(ctx: Any, of_chunk: OfChunk, teacher: _TeacherChunks, size: int, *tensors: Tensor | None) -> Any:
        """Return a loss () for each student, of whose head there are inputs (n, H), weight (V, H) and bias (V,)."""
        needed = ctx.needs_input_grad[3:]
        gradients = [_zeros(x) if x is not None and need else None for x, need in zip(tensors, needed, strict=True)]
        students = range(len(tensors) // 3)
        first = tensors[0]
        assert first is not None
        sums = [torch.zeros((), dtype=torch.float64, device=first.device) for _ in students]
        for start in range(0, max(len(first), 1), size):  # once at least: terms have names without tokens, too
            part = slice(start, start + size)
            taught = teacher.of_chunk(part)
            for i in students:
                inputs, weight, bias = tensors[3 * i : 3 * i + 3]
                assert inputs is not None
                assert weight is not None
                logits = _widen(logits_of(inputs[part], weight, bias))
                sums[i] += _loss_and_gradient(logits, partial(of_chunk, i), taught, start)
                _add_gradients(gradients[3 * i : 3 * i + 3], logits, inputs[part], weight, part)
        ctx.gradients, ctx.types = gradients, [None if x is None else x.dtype for x in tensors]
        return tuple(total.to(torch.float64 if first.dtype == torch.float64 else torch.float32) for total in sums)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        """Multiply the gradients by those of the losses."""
        gradients, ctx.gradients = ctx.gradients, None
        for i, x in enumerate(gradients):
            if x is not None:
                x.mul_(slopes[i // 3].to(x.dtype))
        return None, None, None, *(x if x is None else x.to(kind) for x, kind in zip(gradients, ctx.types, strict=True))


def _widen(x: Tensor) -> Tensor:
    """Numbers of float16 in float32: slopes are made before backward scales losses, and would be 0 in float16."""
    return x.float() if x.dtype == torch.float16 else x


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)


def _loss_and_gradient(
    logits: Tensor, terms: Callable[[Tensor, Outputs | None, slice], Tensor], teacher: Outputs | None, start: int
) -> Tensor:
    """Return the loss of a chunk's logits (n, V), from token `start` on; replace them by its gradient."""
    size = BLOCK if logits.device.type == "cpu" else len(logits)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for first in range(0, max(len(logits), 1), max(size, 1)):
        block = slice(first, first + size)
        z = logits[block].detach().requires_grad_()
        taught = teacher and teacher.map(itemgetter(block))
        # A view: FlopCounterMode puts hooks on what modules are called with, and refuses leaves.
        with torch.enable_grad():
            loss = terms(z.view_as(z), taught, slice(start + first, start + first + len(z)))
        total += loss.detach()
        (slope,) = torch.autograd.grad(loss, z)
        logits[block] = slope
    return total


def _add_gradients(gradients: list[Tensor | None], slope: Tensor, inputs: Tensor, weight: Tensor, part: slice) -> None:
    """Add what a chunk's logits, by their gradient (n, V), give to the gradients of inputs, weight and bias."""
    of_inputs, of_weight, of_bias = gradients
    with torch.autocast(slope.device.type, enabled=False):
        if of_inputs is not None:
            of_inputs[part] = slope @ weight.to(slope.dtype)
        if of_weight is not None and of_weight.dtype == slope.dtype:
            torch.addmm(of_weight, slope.mT, inputs.to(slope.dtype), out=of_weight)  # addmm_ has no formula of FLOPs
        elif of_weight is not None:
            of_weight += slope.mT @ inputs.to(slope.dtype)
        if of_bias is not None:
            of_bias += slope.sum(0)
