"""What methods of logits compare: distributions of student and teacher, softened by a temperature."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.nets.ensemble import MEMBERS
from lit_modules.objectives.base import Objective, checked_temperature

EPS = 1e-7


class LogitObjective(Objective):
    """An objective of logits alone.

    Args:
        temperature: T, which divides logits.
        standardize: whether logits are first brought to mean 0 and deviation 1 over the classes (Sun et al. 2024,
            arXiv:2403.01427), so that the student learns their relation and not their range; the paper has T 2 and a
            weight of 9, 0.1 for the cross-entropy.

    Raises:
        BadInput: in `build`, `standardize` and two classes, whose standardised logits are the same for all samples but
            for the sign.
    """

    def __init__(self, temperature: float = 1.0, standardize: bool = False) -> None:
        super().__init__()
        self.temperature, self.standardize = checked_temperature(temperature), standardize

    def build(self, student: Outputs, teacher: Outputs | None) -> None:  # noqa: D102
        if self.standardize and (classes := student.logits.shape[-1]) < 3:
            why = "standardised logits of two are always 0.707 and -0.707, and have no gradient"
            raise BadInput("standardize", True, f"at least 3 classes, not {classes}: {why}")

    def tempered(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """Logits over T of the student and of the teacher, (b, ..., classes)."""
        assert teacher is not None
        return tuple(tempered(outputs, self.temperature, self.standardize) for outputs in (student, teacher))  # type: ignore[return-value]


def tempered(outputs: Outputs, temperature: float | Tensor, standardize: bool = False) -> Tensor:
    """Logits (b, ..., classes) whose softmax is the distribution at a temperature, standardised before if asked.

    The temperature may be (b,), one for each sample. An ensemble's distribution is the mean of its members' at it.
    """
    members = outputs.features.get(MEMBERS)  # (b, M, ..., classes)
    z = outputs.logits if members is None else members
    if isinstance(temperature, Tensor):
        temperature = temperature.view(-1, *[1] * (z.dim() - 1))
    z = (standardized(z) if standardize else z) / temperature
    return z if members is None else F.log_softmax(z, -1).logsumexp(1) - math.log(z.shape[1])


def standardized(z: Tensor) -> Tensor:
    """(z - mean) / (1e-7 + deviation) of logits (b, ..., classes); 0, without gradient, where these are equal.

    Logits count as equal if rounding can explain their difference.
    """
    centred = z - z.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / max(z.shape[-1] - 1, 1)
    equal = variance.sqrt() <= EPS + 8 * torch.finfo(z.dtype).eps * z.abs().amax(-1, keepdim=True)
    return (centred / (EPS + variance.where(~equal, 1.0).sqrt())).where(~equal, 0.0)  # NaN where one is not finite


def of_label(values: Tensor, labels: Tensor) -> Tensor:
    """(b, ...) of values (b, ..., classes), those of the labels."""
    return values.gather(-1, labels[..., None]).squeeze(-1)


def split_at_label(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The label's class apart from the others.

    Returns log p_y and log(1 - p_y), each (b, ...), of logits (b, ..., classes); the log-probabilities among the other
    classes, 0 for the label's; and whether a class is another, both (b, ..., classes).

    1 - p_y is a sum over the other classes: of a confident net it is not the difference of two numbers near 1.
    """
    others = F.one_hot(labels, z.shape[-1]) == 0
    total, rest = z.logsumexp(-1), z.masked_fill(~others, -torch.inf).logsumexp(-1)
    return of_label(z, labels) - total, rest - total, (z - rest[..., None]).where(others, 0.0), others


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(b, ...) of KL(p || q) from logarithms (b, ..., parts); where both are 0 it counts nothing."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def whole_epochs_share(epoch: float, warmup: int) -> float:
    """The share of a weight that grows in `warmup` epochs: 1 / warmup in the first, the whole in the last; 0: none."""
    return min((int(epoch) + 1) / warmup, 1.0) if warmup else 1.0


def checked_warmup(warmup: int) -> int:
    """The epochs in which a weight grows, if they are none or more; raises BadInput otherwise."""
    if warmup < 0:
        raise BadInput("warmup", warmup, "a number of epochs, 0 or more")
    return warmup


def check_classes(student: Outputs, name: str, fewest: int = 3) -> None:
    """Raise BadInput if there are so few classes that the method has nothing to compare."""
    if (classes := student.logits.shape[-1]) < fewest:
        raise BadInput("classes", classes, f"at least {fewest}: {name} compares classes other than a label's")
