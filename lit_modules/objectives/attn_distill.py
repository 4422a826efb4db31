"""Attention of the class token of vision transformers (AttnDistill, Wang et al. 2022)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.projections import products
from lit_modules.nets.tokens import TokenGrid
from lit_modules.objectives.base import Outputs, Term, ce_term, positive, weight
from lit_modules.objectives.logits import divergence
from lit_modules.objectives.relations import RelationObjective
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import number_layers

SMALLEST = 1e-5  # weight of a patch in a map of another size: cubic interpolation gives values below 0
ROWS = "rows"  # features of the objective's own: rows.0, ...


class AttnDistill(RelationObjective):
    """attention_weight * sum over heads of KL(a_t || a_s) + ce_weight * CE; for ViTs with a class token.

    a are the attention weights of the class token over itself and the patches, in the last block; distillation and
    register tokens are left out. Where the patches of the teacher are of another grid, its weights are interpolated
    (bicubic), and keep the share of the class token. Where the nets have different numbers of heads, or with
    `aggregate`, heads become one map, softmax(sum over heads of log a / temperature).

    Source: Wang, Yang and van de Weijer 2022, "Attention Distillation: self-supervised vision transformer students need
    more guidance" (arXiv:2210.00944), attention guidance, with the weight of the code released with it. Its other term,
    an MLP that aligns the class tokens of nets without a classifier, is left out: `Sum` joins this with `Hinton`.

    Args:
        attention_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        temperature: of the heads' common map.
        aggregate: whether heads are compared as one map; default: only if their numbers differ.
        student_stages: blocks, of which the mean is taken; default: the last.
        teacher_stages: as many of the teacher.

    Raises:
        BadInput: in `choose`, a layer is no block whose attention is known, or a net has no class token; in `build`,
            heads can't be compared one by one.
    """

    search = space(attention_weight=Log(0.01, 10))

    def __init__(
        self,
        attention_weight: float = 0.1,
        ce_weight: float = 1.0,
        temperature: float = 10.0,
        aggregate: bool | None = None,
        student_stages: list[str] | None = None,
        teacher_stages: list[str] | None = None,
    ) -> None:
        super().__init__(student_stages=student_stages, teacher_stages=teacher_stages)
        self.attention_weight = weight("attention_weight", attention_weight)
        self.ce_weight = weight("ce_weight", ce_weight)
        self.temperature, self.aggregate = positive("temperature", temperature), aggregate
        self.joins = False

    def choose_blocks(self, student: nn.Module, teacher: nn.Module) -> None:
        nets = {"student_stages": (student, self.grids[0]), "teacher_stages": (teacher, self.grids[1])}
        for option, (net, grid) in nets.items():
            has_class_token = getattr(getattr(net, "model", net), "has_class_token", True)
            if grid is None or not grid.before or not has_class_token:
                raise BadInput(option, type(net).__name__, "a ViT with a class token")
        if not any(self.stages.values()):
            self.student_layers, self.teacher_layers = (number_layers(option, ["stage-1"]) for option in self.stages)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        pairs = [(s.heads, t.heads) for s, t in zip(*self.projections.values(), strict=True)]
        differ = next(((s, t) for s, t in pairs if s != t), None)
        if differ and self.aggregate is False:
            expected = f"true or null, as the student has {differ[0]} heads and the teacher {differ[1]}"
            raise BadInput("aggregate", False, expected)
        self.joins = bool(differ) if self.aggregate is None else self.aggregate

    def adapt(self, student: Outputs) -> Outputs:
        """Add the logarithms of weights (b, heads, 1 + patches) of each block, as `rows.<number>`."""
        return student.with_features(self._rows("student_stages", student.features))

    def condense(self, teacher: Outputs) -> Outputs:
        """Reduce the teacher's layers to the same, on the student's grid."""
        rows = self._rows("teacher_stages", teacher.features)
        return teacher._replace(features={name: self._fit(row) for name, row in rows.items()})

    def _rows(self, option: str, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        grid = self._grid(option)
        rows = dict[str, Tensor]()
        for number, projections in enumerate(self.projections[option]):
            query, key, _ = projections.split([features[path] for path in projections.paths])
            key = torch.cat([key[:, :1], key[:, grid.before :]], 1)
            scores = products(query[:, :1], key, projections.scale_of(query.shape[3]))[:, 0]
            rows[f"{ROWS}.{number}"] = scores.log_softmax(-1)
        return rows

    def _grid(self, option: str) -> TokenGrid:
        grid = self.grids[option == "teacher_stages"]
        assert grid is not None
        return grid

    def _fit(self, row: Tensor) -> Tensor:
        """Interpolate the logarithms (b, heads, 1 + patches) of the teacher's weights to the student's patches."""
        (rows, columns), (height, width) = (self._grid(option)[:2] for option in ("teacher_stages", "student_stages"))
        if (rows, columns) == (height, width):
            return row
        first, patches = row.exp().split([1, rows * columns], -1)
        maps = F.interpolate(patches.unflatten(-1, (rows, columns)), (height, width), mode="bicubic").flatten(-2)
        maps = maps.clamp(min=SMALLEST)
        maps = maps * ((1 - first) / maps.sum(-1, keepdim=True))
        return torch.cat([first, maps], -1).clamp(min=torch.finfo(maps.dtype).tiny).log()

    def join_heads(self, row: Tensor) -> Tensor:
        """Return one map (b, 1, 1 + patches) of all heads, as logarithms, if heads are not compared one by one."""
        if not self.joins:
            return row
        return (row.sum(1, keepdim=True) / self.temperature).log_softmax(-1)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        values = [
            divergence(self.join_heads(teacher.features[name]), self.join_heads(student.features[name])).sum(1)
            for name in (f"{ROWS}.{number}" for number in range(len(self.projections["student_stages"])))
        ]
        attention = Term(torch.stack(values).mean(0), self.attention_weight)
        return {"attention": attention, "ce": ce_term(student, labels, self.ce_weight)}
