"""Contrastive representation distillation (Tian, Krishnan and Isola 2020, arXiv:1910.10699)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice import keyed
from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, positive, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.embeddings import EmbeddingObjective
from lit_modules.objectives.search import Log, space

DIMENSIONS = 128  # of the space in which student and teacher are compared
EPS = 1e-7


class CRD(EmbeddingObjective):
    """crd_weight * (contrast of the student + contrast of the teacher) + ce_weight * CE.

    Both nets' embeddings pass a trained linear map to 128 dimensions and are normalised: g. A memory bank of each net
    has a row m of every training sample. The student's g_i is contrasted with the teacher's bank, and the other way
    round (equations 11 and 19 of the paper):

        -log(h_i / (h_i + c)) - sum_k log(c / (h_k + c)),  h_j = exp(<g_i, m_j> / temperature) / Z,  c = K / N

    over K samples k of other classes, of N. As in the code released with the paper, h_i reads the bank, whose row is
    older than this batch; then m_i becomes the normalised mean of m_i and g_i, of the first row if a sample comes in
    several. Z is N times the mean of exp(...) in the first batch, and fixed: published results have it so. Samples not
    seen yet have random rows and count as of other classes. If N is `negatives` or less, k runs over all samples of
    other classes, each once; otherwise K are drawn with replacement, from the step and the sample alone.

    Beside `Hinton` (T 4, weight 1), the weight stays 0.8.

    The banks take N x 256 floats, the scores of B rows 2 x B x N.

    Args:
        crd_weight: weight of both contrasts.
        ce_weight: weight of the cross-entropy with the labels.
        temperature: divides the scores.
        negatives: K, the most samples that each is contrasted with.
        layers: those of EmbeddingObjective.

    Raises:
        BadInput: in `build`, batches do not name their samples, or logits are not (b, classes).
    """

    compares = frozenset({"classes"})
    search = space(crd_weight=Log(0.05, 5), temperature=Log(0.03, 0.3))
    fewest_related = 1  # rows are related to the banks
    needs_labels = True
    bank_s: Tensor
    bank_t: Tensor
    classes: Tensor  # (N,) of the samples, -1 if not seen yet
    normalisers: Tensor  # (2,) Z of student and teacher, 0 before the first batch

    def __init__(
        self,
        crd_weight: float = 0.8,
        ce_weight: float = 1.0,
        temperature: float = 0.07,
        negatives: int = 16384,
        **layers: Any,
    ) -> None:
        super().__init__(**layers)
        self.crd_weight, self.ce_weight = weight("crd_weight", crd_weight), weight("ce_weight", ce_weight)
        if not 0.02 <= temperature <= 1e6:
            raise BadInput("temperature", temperature, "a number from 0.02, whose scores float32 holds, to 1e6")
        self.temperature, self.negatives = temperature, int(positive("negatives", negatives))

    def build(self, student: Outputs, teacher: Outputs | None, context: StepContext = NO_STEP) -> None:
        if (samples := context.samples) is None:
            raise BadInput("", "CRD", "a data module whose batches name their samples")
        if student.logits.dim() != 2:
            raise BadInput("", "CRD", f"nets of one label a sample; logits are {tuple(student.logits.shape[1:])}")
        self.head_s, self.head_t = (nn.Linear(e.shape[1], DIMENSIONS) for e in self.embeddings(student, teacher))
        for name in ("bank_s", "bank_t"):
            bound = (3 / DIMENSIONS) ** 0.5  # rows of length 1, on average
            self.register_buffer(name, torch.empty(samples, DIMENSIONS).uniform_(-bound, bound))
        self.register_buffer("classes", torch.full((samples,), -1))
        self.register_buffer("normalisers", torch.zeros(2))

    def teacher_parts(self) -> list[nn.Module]:
        return [self.head_t]

    def adapt(self, student: Outputs) -> Outputs:
        """Map the student's features to embeddings (b, 128), not yet normalised."""
        path = self.student_layer
        return student.with_features({path: self.head_s(student.features[path].flatten(1))})

    def adapt_teacher(self, teacher: Outputs) -> Outputs:
        """Map the teacher's features to embeddings (b, 128), not yet normalised."""
        path = self.teacher_layer
        return teacher.with_features({path: self.head_t(teacher.features[path].flatten(1))})

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        sides = enumerate(self._scores(student, teacher, labels, context))
        contrasts = [_contrast(*side, self._normaliser(i, *side), len(self.classes)) for i, side in sides]
        crd = Term(contrasts[0] + contrasts[1], self.crd_weight, labelled=True)
        return {"crd": crd, "ce": ce_term(student, labels, self.ce_weight)}

    def after_batch(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> None:
        """Fix Z in the first batch; move the rows of the batch's samples in the banks."""
        sides, index = self._scores(student, teacher, labels, context), _index(context)
        self.normalisers.copy_(torch.stack([self._normaliser(i, *side) for i, side in enumerate(sides)]))
        self.classes.copy_(self.classes.index_copy(0, index, labels))
        for bank, g in zip((self.bank_s, self.bank_t), self._unit_embeddings(student, teacher), strict=True):
            moved = F.normalize(0.5 * bank[index].to(g) + 0.5 * g, dim=1)
            bank[index] = moved[_first_rows(index)].to(bank)

    def _unit_embeddings(self, student: Outputs, teacher: Outputs | None) -> list[Tensor]:
        return [F.normalize(e, dim=1) for e in self.embeddings(student, teacher)]

    def _scores(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for student and teacher the scores with the same sample (B,), with others (B, n), and their mask."""
        index = _index(context)
        draw = self._draw_others(self.classes.index_copy(0, index, labels), labels, context)
        for g, bank in zip(self._unit_embeddings(student, teacher), (self.bank_t, self.bank_s), strict=True):
            # A product with the whole bank: its rows for each sample, B x K x 128 floats, take more time and memory.
            scores = g @ bank.to(g, copy=True).T / self.temperature  # (B, N); the bank changes before the backward
            same = scores.gather(1, index[:, None])[:, 0]
            yield same, *draw(scores)

    def _draw_others(
        self, classes: Tensor, labels: Tensor, context: StepContext
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function from scores (B, N) to those with samples of other classes, and their mask.

        `classes` (N,) are those of all samples, updated by the labels of this batch.
        """
        if len(classes) <= self.negatives:
            return lambda scores: (scores, classes != labels[:, None])
        ordered, order = classes.sort(stable=True)
        first, last = (torch.searchsorted(ordered, labels, right=right)[:, None] for right in (False, True))
        random = keyed.bits(keyed.fold_in(context.step), _index(context), self.negatives)
        place = random * (len(order) - last + first) >> 32  # among the samples of other classes
        drawn = order[place.where(place < first, place + last - first)]
        return lambda scores: (scores.gather(1, drawn), torch.ones_like(drawn, dtype=torch.bool))

    def _normaliser(self, side: int, same: Tensor, others: Tensor, mask: Tensor) -> Tensor:
        """Return Z of the student's side (0) or the teacher's (1)."""
        if self.normalisers[side]:
            return self.normalisers[side].to(same)
        total = same.detach().exp().sum() + others.detach().exp().where(mask, 0.0).sum()
        return len(self.classes) * total / (len(same) + mask.sum())


def _index(context: StepContext) -> Tensor:
    assert context.index is not None  # as `samples` is known
    return context.index


def _first_rows(index: Tensor) -> Tensor:
    """Return (B,), of each row the first one with its sample, as of several writes a GPU keeps any one."""
    return (index[:, None] == index).int().argmax(1)


def _contrast(same: Tensor, others: Tensor, mask: Tensor, z: Tensor, samples: int) -> Tensor:
    """Return losses (B,) of scores with the same sample (B,) and with others (B, n) where the mask is true."""
    c = mask.sum(1).clamp(min=1).to(same) / samples
    positive_loss = torch.log1p((c + EPS) / (same - z.log()).exp())
    negative_losses = torch.log1p(((others - z.log()).exp() + EPS) / c[:, None])
    return positive_loss + negative_losses.where(mask, 0.0).sum(1)
