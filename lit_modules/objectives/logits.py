"""The base class of objectives of logits, and the distributions that they compare."""

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.ensemble import MEMBERS, SHARES, average_members
from lit_modules.objectives.base import Outputs, check_temperature
from lit_modules.objectives.text_objective import TextObjective
from lit_modules.objectives.top_k import top_k_log_probabilities

EPS = 1e-7


class LogitObjective(TextObjective):
    """An objective of logits alone.

    Args:
        temperature: T, which divides logits.
        standardize: whether to bring logits to mean 0 and deviation 1 over the classes first (Sun et al. 2024,
            arXiv:2403.01427), so that the student learns their relation and not their range; the paper has T 2 and a
            weight of 9, 0.1 for the cross-entropy. Not for two classes, whose standardised logits differ in sign only.
    """

    by_token = True

    def __init__(self, temperature: float = 1.0, standardize: bool = False) -> None:
        super().__init__()
        self.temperature, self.standardize = check_temperature(temperature), standardize
        self.temperatures = {self.temperature}
        self.compared: Tensor | None = None  # numbers (n,) of those classes that a teacher has, if it lacks some

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        if teacher is not None and teacher.logits.dim() > 2:
            lacks = (teacher.logits == -torch.inf).flatten(0, -2).all(0)
            self.compared = (~lacks).nonzero().flatten() if lacks.any() else None
        if self.standardize and (classes := student.logits.shape[-1]) < 3:
            why = "standardised logits of two are always 0.707 and -0.707, and have no gradient"
            raise BadInput("standardize", True, f"at least 3 classes, not {classes}: {why}")

    def temper(
        self, student: Outputs, teacher: Outputs | None, temperature: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Divide the logits (b, ..., classes) of student and teacher by T, or another temperature."""
        assert teacher is not None
        t = self.temperature if temperature is None else temperature
        return temper(student, t, self.standardize), temper(teacher, t, self.standardize)

    def log_probabilities(
        self, student: Outputs, teacher: Outputs | None, temperature: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log p_s and log p_t (b, ..., classes), the logarithms of the softmax of what `temper` gives.

        Of a teacher that is stored in k tokens they are those of `top_k_log_probabilities`: of fewer events. Classes of
        which the teacher's logits are always -inf are left out of both, whose distributions are those of the others.
        """
        if teacher is not None and teacher.top_k:
            assert not isinstance(temperature, Tensor)
            t = self.temperature if temperature is None else temperature
            return top_k_log_probabilities(student.logits, teacher, t)
        z_s, z_t = self.temper(student, teacher, temperature)
        if (compared := self.compared) is not None:
            z_s, z_t = (z.index_select(-1, compared.to(z.device)) for z in (z_s, z_t))
        return F.log_softmax(z_s, -1), F.log_softmax(z_t, -1)

    def refuse_absent(self) -> None:
        """Raise BadInput if the teacher lacks some classes, and the method can't leave them out."""
        if self.compared is not None:
            expected = "a method of whole distributions, as Hinton: the teacher lacks some of the data's tokens"
            raise BadInput("", type(self).__name__, expected)


class LabelObjective(LogitObjective):
    """An objective of logits that compares the classes other than the label's, of which there have to be two.

    Attributes:
        warmup: epochs in which its terms get their full weights; 0 for none.
    """

    warmup: int = 0

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        self.refuse_absent()
        if (classes := student.logits.shape[-1]) < 3:
            name = type(self).__name__
            raise BadInput("classes", classes, f"at least 3: {name} compares classes other than a label's")

    def warmup_share(self, epoch: float) -> float:
        """Return the share of its terms' weights, which grows by whole epochs from 1 / warmup to 1."""
        return min((int(epoch) + 1) / self.warmup, 1.0) if self.warmup else 1.0


def temper(outputs: Outputs, temperature: float | Tensor, standardize: bool = False) -> Tensor:
    """Return logits (b, ..., classes) whose softmax is the distribution at a temperature.

    The temperature may be (b,), one for each sample. An ensemble's distribution is the mean of its members'.
    """
    members = outputs.features.get(MEMBERS)  # (b, M, ..., classes)
    z = outputs.logits if members is None else members
    if isinstance(temperature, Tensor):
        temperature = temperature.view(-1, *[1] * (z.dim() - 1))
    z = (zscore(z) if standardize else z) / temperature
    return z if members is None else average_members(z, outputs.features.get(SHARES))


def zscore(z: Tensor) -> Tensor:
    """Compute (z - mean) / (1e-7 + deviation) of logits (b, ..., classes); 0, without gradient, where these are equal.

    Logits count as equal if rounding can explain their difference.
    """
    centred = z - z.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / max(z.shape[-1] - 1, 1)
    equal = variance.sqrt() <= EPS + 8 * torch.finfo(z.dtype).eps * z.abs().amax(-1, keepdim=True)
    return (centred / (EPS + variance.where(~equal, 1.0).sqrt())).where(~equal, 0.0)  # NaN where one is not finite


def pick_label(values: Tensor, labels: Tensor) -> Tensor:
    """Return (b, ...), the labels' values among values (b, ..., classes)."""
    return values.gather(-1, labels[..., None]).squeeze(-1)


def split_at_label(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the distribution of logits (b, ..., classes) into the label's class and the others.

    Returns log p_y and log(1 - p_y), each (b, ...); then, both (b, ..., classes), the log-probabilities among the other
    classes, 0 for the label's, and the mask of the other classes.

    1 - p_y is a sum over the other classes, as for a confident net 1 and p_y are too close for a difference.
    """
    others = F.one_hot(labels, z.shape[-1]) == 0
    total, rest = z.logsumexp(-1), z.masked_fill(~others, -torch.inf).logsumexp(-1)
    return pick_label(z, labels) - total, rest - total, (z - rest[..., None]).where(others, 0.0), others


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (b, ...), KL(p || q), from logarithms (b, ..., parts); where both are 0 they count nothing."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def check_warmup(warmup: int) -> int:
    """Return the number of warm-up epochs; raise BadInput unless it is zero or more."""
    if warmup < 0:
        raise BadInput("warmup", warmup, "a number of epochs, 0 or more")
    return warmup
