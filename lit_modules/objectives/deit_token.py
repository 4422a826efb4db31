"""DeiT's distillation token (Touvron et al. 2021, arXiv:2012.12877), whose head learns from the teacher."""

from typing import Literal

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, cross_entropy, kl, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Choice, Log, space


class DeiTToken(LogitObjective):
    """ce_weight * CE(z_class, label) + token_weight * the loss of the distillation head z_token.

    Hard (the paper's equation 3): CE(z_token, argmax z_t). Soft (equation 2): T^2 * KL(softmax(z_t / T) ||
    softmax(z_token / T)), a mean over the batch as in the equation. The code released with the paper divides by batch
    and classes: its token_weight is token_weight / classes here.

    For a student with two heads whose logits are their mean: `ViT` with `distillation_token`, or timm's distilled
    models. A third term, of weight 0, is the cross-entropy of these logits.

    Args:
        kind: learn the teacher's decisions (hard) or its distribution (soft).
        token_weight: weight of the distillation head's term; the paper has 0.5 for hard, 0.1 for soft.
        ce_weight: weight of the class head's cross-entropy; the paper has 0.5 and 0.9.
        temperature: T, for soft only.
        student_layer: path of the distillation head, which gives (b, classes).
        class_layer: path of the class head.
        standardize: that of LogitObjective, for soft only.
    """

    search = space(kind=Choice(("hard", "soft")), token_weight=Log(0.05, 5), temperature=Log(1, 16))
    needs = "DeiTToken needs a distillation head, as ViT has it with distillation_token"

    def __init__(
        self,
        kind: Literal["hard", "soft"] = "hard",
        token_weight: float = 0.5,
        ce_weight: float = 0.5,
        temperature: float = 3.0,
        student_layer: str = "head_dist",
        class_layer: str = "head",
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        if kind not in {"hard", "soft"}:
            raise BadInput("kind", kind, "hard or soft")
        self.kind = kind
        self.token_weight, self.ce_weight = weight("token_weight", token_weight), weight("ce_weight", ce_weight)
        self.student_layers = {"student_layer": student_layer, "class_layer": class_layer}

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Raise BadInput for a layer that gives no logits, and as in LogitObjective."""
        for flag, path in self.student_layers.items():
            if (shape := student.features[path].shape[1:]) != (logits := student.logits.shape[1:]):
                raise BadInput(flag, path, f"a head that gives logits {tuple(logits)}; this layer gives {tuple(shape)}")
        if self.kind == "soft":
            super().build(student, teacher)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        z_token, z_class = (student.features[path] for path in self.student_layers.values())
        if self.kind == "hard":
            token = cross_entropy(z_token, teacher.logits.argmax(-1))
        else:
            log_s, log_t = self.log_probabilities(Outputs(z_token, {}), teacher)
            token = kl(log_t, log_s) * self.temperature**2
        return {
            "token": Term(token, self.token_weight),
            "ce": Term(cross_entropy(z_class, labels), self.ce_weight, labelled=True, class_weighted=True),
            # For monitoring; FSDP would wait for the gradient of an unused output.
            "mean": ce_term(student, labels, 0.0),
        }
