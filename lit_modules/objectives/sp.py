"""Similarity-preserving distillation (Tung and Mori 2019, arXiv:1907.09682)."""

from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.layers import DEFAULT_LAYER
from lit_modules.objectives.base import Term, weight
from lit_modules.objectives.embeddings import RelationObjective
from lit_modules.objectives.search import Log, space


class SP(RelationObjective):
    """sp_weight * sum over j of (G_s - G_t)_ij^2 / B + ce_weight * CE, G_i the row i of f f^T divided by its length.

    f has a flattened map for each sample of the global batch, of one pair of layers, by default the last stages. The
    paper sums over several pairs; one, and the weight, are those of the comparison by Tian et al. 2020
    (arXiv:1910.10699).

    Args:
        sp_weight: weight of the difference of similarities.
        ce_weight: weight of the cross-entropy with the labels.
        student_layer: path of the student's layer, flattened.
        teacher_layer: path of the teacher's layer, flattened.
    """

    search = space(sp_weight=Log(30, 30_000))

    def __init__(
        self,
        sp_weight: float = 3000.0,
        ce_weight: float = 1.0,
        student_layer: str = DEFAULT_LAYER,
        teacher_layer: str = DEFAULT_LAYER,
    ) -> None:
        super().__init__(student_layer, teacher_layer)
        self.sp_weight, self.ce_weight = weight("sp_weight", sp_weight), weight("ce_weight", ce_weight)

    def relations(self, e_s: Tensor, e_t: Tensor) -> dict[str, Term]:
        g_s, g_t = (F.normalize(e @ e.T) for e in (e_s, e_t))
        return {"sp": Term((g_s - g_t).square().mean(1), self.sp_weight)}
