"""Regression of logits (Ba and Caruana 2014, arXiv:1312.6184)."""

from torch import Tensor

from lit_modules.nets.outputs import CLASSES, LABELS, VALUES
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space


class LogitMSE(LogitObjective):
    """mse_weight * mean over classes of (z_s - z_t)^2 + ce_weight * CE; an ensemble's z_t is log of its mean p_t.

    Args:
        mse_weight: weight of the squared difference.
        ce_weight: weight of the cross-entropy with the labels; the paper has none.
        standardize: that of LogitObjective.
    """

    compares = frozenset({CLASSES, LABELS, VALUES})
    search = space(mse_weight=Log(0.01, 10))

    def __init__(self, mse_weight: float = 1.0, ce_weight: float = 1.0, standardize: bool = False) -> None:
        super().__init__(standardize=standardize)
        if standardize:
            self.compares = frozenset({CLASSES})
        self.mse_weight, self.ce_weight = weight("mse_weight", mse_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        z_s, z_t = self.temper(student, teacher)
        mse = Term((z_s - z_t).square().mean(-1), self.mse_weight)
        return {"mse": mse, "ce": ce_term(student, labels, self.ce_weight)}
