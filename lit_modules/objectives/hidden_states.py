"""Hidden states of transformers, layer by layer (TinyBERT, Jiao et al. 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import StagesObjective, map_blocks

PROJECTED = "projected"  # features of the student, by the number of the pair


class HiddenStates(StagesObjective):
    """hidden_weight * mean over layers and D_t of (W_m h_s - h_t)^2 + ce_weight * CE, for each token of a text.

    h are outputs of blocks (b, T, D_s) and (b, T, D_t). W_m is trained with the student, one for each pair of layers,
    and not exported. Layers are paired by `student_stages` and `teacher_stages`; without them each block of the student
    is paired, number m of M with number m N / M of the teacher's N; one of a student that is `Pruned`, with the block
    before the next one that it keeps.

    Source: Jiao et al. 2020, "TinyBERT: Distilling BERT for Natural Language Understanding" (arXiv:1909.10351),
    equation 8, with its uniform map of layers; without the embeddings.

    Args:
        hidden_weight: weight of the squared difference.
        ce_weight: weight of the cross-entropy with the labels.

    Raises:
        BadInput: in `build`, a layer gives no tokens (b, T, D); in `choose`, a net names no blocks.
    """

    search = space(hidden_weight=Log(0.01, 10))

    def __init__(self, hidden_weight: float = 1.0, ce_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        self.hidden_weight, self.ce_weight = weight("hidden_weight", hidden_weight), weight("ce_weight", ce_weight)

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Choose the teacher's block for each of the student's, unless the options name layers."""
        super().choose(student, teacher)
        map_blocks(self, student, teacher)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        pairs = self._states(student, teacher)
        layers = [*self.student_layers.items()], [*self.teacher_layers.items()]
        for states, named in zip(zip(*pairs, strict=True), layers, strict=True):
            for x, (option, path) in zip(states, named, strict=True):
                if x.dim() != 3 or x.shape[:2] != student.logits.shape[:2] or student.logits.dim() != 3:
                    raise BadInput(option, path, f"a layer that gives tokens of texts (T, D), not {tuple(x.shape[1:])}")
        self.projections = nn.ModuleList(nn.Linear(s.shape[2], t.shape[2], bias=False) for s, t in pairs)

    def adapt(self, student: Outputs) -> Outputs:
        """Add the projected states (b, T, D_t) of each layer."""
        paths = zip(self.student_layers.values(), self.projections, strict=True)
        projected = {f"{PROJECTED}.{i}": layer(student.features[path]) for i, (path, layer) in enumerate(paths)}
        return student.with_features(projected)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        differences = [
            (student.features[f"{PROJECTED}.{i}"] - h_t).square().mean(-1)
            for i, (_, h_t) in enumerate(self._states(student, teacher))
        ]
        hidden = Term(torch.stack(differences).mean(0), self.hidden_weight)  # (b, T)
        return {"hidden": hidden, "ce": ce_term(student, labels, self.ce_weight)}

    def _states(self, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        assert teacher is not None
        paths = zip(self.student_layers.values(), self.teacher_layers.values(), strict=True)
        return [(student.features[path_s], teacher.features[path_t]) for path_s, path_t in paths]
