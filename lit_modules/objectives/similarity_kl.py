"""Similarities to other samples, as the teacher has them, in the batch or in a queue of embeddings.

SEED (Fang et al. 2021, arXiv:2101.04731), CompRess (Abbasi Koohpayegani et al. 2020, arXiv:2010.14713) and the first
and third methods of lightly-train differ in what is in the queue; here it has the teacher's embeddings, for both nets.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, check_temperature, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.embedding_match import PROJECTED, ProjectedObjective
from lit_modules.objectives.search import Log, space

AUTO, LONGEST = "auto", 8192


class SimilarityKL(ProjectedObjective):
    """similarity_weight * KL(softmax_j(cos(t_i, q_j) / T_t) || softmax_j(cos(s_i, q_j) / T_s)).

    q are the teacher's embeddings of other samples: of the rest of the global batch or, with a `queue`, of as many
    samples as it holds, the latest, among them this batch and the sample itself. There is one queue for all ranks; its
    places count once they are filled. Of rows of k texts, (b, k, D), each text is a sample.

    Args:
        queue: samples whose embeddings are kept; 0 compares with the other samples of the batch; `auto` is the largest
            power of two that is at most a quarter of the training set, and at most 8,192.
        temperature: T_s, which divides the student's cosines.
        teacher_temperature: T_t; default: as the student's.
        similarity_weight: weight of the divergence.
        project: see `ProjectedObjective`.

    Raises:
        BadInput: a value can't be used; in `build`, the queue is longer than the training set.
    """

    relates_rows = True
    fewest_related = 3  # of two rows each has one other, whose share is 1
    search = space(temperature=Log(0.02, 0.5))
    length: int  # of the queue, after `build`
    embeddings: Tensor  # (length, D_t), of unit length
    filled: Tensor  # how many samples the queue has seen, at most its length
    next: Tensor  # the place that is written next

    def __init__(
        self,
        queue: int | Literal["auto"] = 0,
        temperature: float = 0.07,
        teacher_temperature: float | None = None,
        similarity_weight: float = 1.0,
        project: bool | None = None,
    ) -> None:
        super().__init__(project)
        if isinstance(queue, int) and queue < 0:
            raise BadInput("queue", queue, "a number of samples, 0 or more, or auto")
        self.queue, self.temperature = queue, check_temperature(temperature)
        self.teacher_temperature = self.temperature
        if teacher_temperature is not None:
            self.teacher_temperature = check_temperature(teacher_temperature)
        self.similarity_weight = weight("similarity_weight", similarity_weight)

    def build(self, student: Outputs, teacher: Outputs | None, context: StepContext = NO_STEP) -> None:
        super().build(student, teacher)
        assert teacher is not None
        texts = teacher.logits.shape[1:-1].numel()  # of a row; 1 of other samples
        samples = None if context.samples is None else context.samples * texts
        self.length = self.queue if isinstance(self.queue, int) else _length(samples)
        if self.length and samples is not None and self.length >= samples:
            raise BadInput("queue", self.queue, f"fewer than the {samples} training samples")
        self.register_buffer("embeddings", torch.zeros(self.length, teacher.logits.shape[-1]))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("next", torch.zeros((), dtype=torch.int64))

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        s, t = _units(student.features[PROJECTED]), _units(teacher.logits)
        others, counts = self._candidates(t)
        log_s, log_t = (
            (x @ others.T / temperature).masked_fill(~counts, -torch.inf).log_softmax(1).masked_fill(~counts, 0.0)
            for x, temperature in ((s, self.temperature), (t, self.teacher_temperature))
        )
        divergence = (log_t.exp() * (log_t - log_s)).masked_fill(~counts, 0.0).sum(1)
        return {"similarity": Term(divergence.view(student.logits.shape[:-1]), self.similarity_weight)}

    def after_batch(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> None:
        """Write this batch into the queue, over the oldest."""
        assert teacher is not None
        if self.length:
            units = _units(teacher.logits)
            embeddings, filled = self._with_batch(units)
            self.next.copy_((self.next + len(units)) % self.length)
            self.embeddings.copy_(embeddings)
            self.filled.copy_(filled)

    def _candidates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (n, D_t) to compare with, and which of them count for each row, (B, n) bool."""
        if not self.length:
            return t, ~torch.eye(len(t), dtype=torch.bool, device=t.device)
        embeddings, filled = self._with_batch(t)
        return embeddings, (torch.arange(self.length, device=t.device) < filled).expand(len(t), -1)

    def _with_batch(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queue with this batch, as much of it as it holds, and how many of its places are filled."""
        t = t[: self.length]
        places = (self.next + torch.arange(len(t), device=t.device)) % self.length
        return self.embeddings.to(t).index_copy(0, places, t), (self.filled + len(t)).clamp(max=self.length)


def _units(embeddings: Tensor) -> Tensor:
    """Return embeddings (b, ..., D), one a row, of unit length."""
    return F.normalize(embeddings.flatten(0, -2))


def _length(samples: int | None) -> int:
    """Return the length of a queue for a training set of so many samples; BadInput if it is not known."""
    if samples is None:
        raise BadInput("queue", AUTO, "a number of samples: batches do not name theirs")
    return int(min(LONGEST, 2 ** math.floor(math.log2(max(samples // 4, 1)))))
