"""Maps and tokens of patches that come to be the teacher's, place by place or by how places resemble one another.

Place by place: MobileSAM (Zhang et al. 2023, arXiv:2306.14289) and the second method of lightly-train; by resemblance
within an image: the local part of lightly-train's third.
"""

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.tokens import as_maps
from lit_modules.objectives.base import FeatureObjective, Outputs, Term, check_map, check_temperature, kl, weight
from lit_modules.objectives.search import Log, space


class TokenObjective(FeatureObjective):
    """An objective that compares maps, or tokens of patches as maps, on the teacher's grid.

    The student's pass a trained linear layer to the teacher's channels, and are then resized bilinearly.

    Args:
        layers: those of FeatureObjective.
    """

    projection: nn.Module
    compares = frozenset({"embeddings"})

    def __init__(self, **layers: Any) -> None:
        super().__init__(**layers)
        self.size: tuple[int, int] | None = None  # of the teacher's grid, after `build`

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        f_s, f_t = self.maps(student, teacher)
        check_map("student_layer", self.student_layer, f_s, self.grids[0])
        check_map("teacher_layer", self.teacher_layer, f_t, self.grids[1])
        self.size = f_t.shape[2], f_t.shape[3]
        self.projection = nn.Conv2d(f_s.shape[1], f_t.shape[1], 1)

    def adapt(self, student: Outputs) -> Outputs:
        """Bring the student's maps to the teacher's channels and grid, (b, C_t, H_t, W_t)."""
        maps = self.projection(as_maps(student.features[self.student_layer], self.grids[0]))
        if maps.shape[2:] != self.size:
            maps = F.interpolate(maps, self.size, mode="bilinear", align_corners=False)
        return student.with_features({self.student_layer: maps})

    def tokens(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """Return the tokens (b, H_t * W_t, C_t) of both, the student's adapted."""
        f_s, (_, f_t) = student.features[self.student_layer], self.maps(student, teacher)
        return f_s.flatten(2).mT, f_t.flatten(2).mT

    @staticmethod
    def token_term(values: Tensor, weight: float, student: Outputs) -> Term:
        """Return the term of values (b, places); layers after the compared one get a gradient of zero, as DDP needs."""
        return Term(values.mean(1) + 0 * student.logits.flatten(1).mean(1), weight)


class TokenMatch(TokenObjective):
    """token_weight * the mean over places of the distance of the student's token to the teacher's.

    `mse` is the square of their difference summed over the channels, `cosine` 1 - their cosine.

    Args:
        distance: mse or cosine.
        token_weight: weight of the distance.
        layers: those of FeatureObjective.

    Raises:
        BadInput: there is no such distance; in `build`, a layer gives no maps.
    """

    search = space(token_weight=Log(0.01, 10))

    def __init__(self, distance: Literal["mse", "cosine"] = "mse", token_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        if distance not in {"mse", "cosine"}:
            raise BadInput("distance", distance, "mse or cosine")
        self.distance, self.token_weight = distance, weight("token_weight", token_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        s, t = self.tokens(student, teacher)
        values = (s - t).square().sum(2) if self.distance == "mse" else 1 - F.cosine_similarity(s, t, dim=2)
        return {"token": self.token_term(values, self.token_weight, student)}


class TokenSimilarity(TokenObjective):
    """token_weight * the mean over places i of KL(softmax_j(cos(t_i, t_j) / T) || softmax_j(cos(s_i, s_j) / T)).

    j are all places of the same image, i among them.

    Args:
        temperature: divides the cosines.
        token_weight: weight of the divergence.
        layers: those of FeatureObjective.
    """

    search = space(temperature=Log(0.02, 0.5), token_weight=Log(0.1, 10))

    def __init__(self, temperature: float = 0.07, token_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        self.temperature = check_temperature(temperature)
        self.token_weight = weight("token_weight", token_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        units = (F.normalize(x, dim=2) for x in self.tokens(student, teacher))
        log_s, log_t = ((x @ x.mT / self.temperature).log_softmax(2) for x in units)
        return {"token": self.token_term(kl(log_t, log_s), self.token_weight, student)}
