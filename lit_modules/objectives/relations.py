"""Relations of tokens inside of self-attention (MiniLM, Wang et al. 2020; its second version 2021; TinyBERT)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.projections import Projections, block_names, find_projections, hide_later, products
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.logits import divergence
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import StagesObjective, match_blocks, number_layers
from lit_modules.objectives.text_objective import TextObjective

PAIRS = {"attention": (0, 1), "value": (2, 2), "query": (0, 0), "key": (1, 1)}  # of queries, keys and values


class RelationObjective(StagesObjective, TextObjective):
    """An objective that compares products of queries, keys and values, of tokens of a text or an image with each other.

    They are computed before anything is masked, as tokens that are learned attend to those of the prompt. A token of a
    text is compared with itself and earlier ones, and has a value of its own; tokens of an image, the class token
    among them, with all, and the image has the mean of their values.

    Attributes:
        kinds: the relations that it compares, of `PAIRS`.

    Args:
        relation_heads: heads into which the queries, keys and values of all attention heads together are cut anew;
            default: the attention heads, of which both nets need the same number.
        layers: `student_stages` and `teacher_stages` of StagesObjective: blocks.
    """

    relates_tokens = True
    kinds: tuple[str, ...] = ()

    def __init__(self, relation_heads: int | None = None, **layers: Any) -> None:
        super().__init__(**layers)
        if relation_heads is not None and relation_heads < 1:
            raise BadInput("relation_heads", relation_heads, "a number of heads, at least 1")
        self.relation_heads, self.causal = relation_heads, True
        self.projections: dict[str, list[Projections]] = {}  # of each block, by the option that names it

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Choose the blocks, and find out where they compute queries, keys and values."""
        super().choose(student, teacher)
        self.choose_blocks(student, teacher)
        layers = {"student_stages": (student, self.student_layers), "teacher_stages": (teacher, self.teacher_layers)}
        for option, (net, named) in layers.items():
            self.projections[option] = [find_projections(net, name, key) for key, name in named.items()]
        self.causal = all(x.causal for x in self.projections["student_stages"])
        self.student_layers, self.teacher_layers = (
            number_layers(option, [path for x in self.projections[option] for path in x.paths]) for option in layers
        )

    def choose_blocks(self, student: nn.Module, teacher: nn.Module) -> None:
        """Choose other blocks than all that both nets have, unless the options name layers."""

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        assert teacher is not None
        if not self.causal:
            self._check_tokens(student, teacher)
        if self.relation_heads is None:
            pairs = zip(*self.projections.values(), strict=True)
            if unequal := next(((s.heads, t.heads) for s, t in pairs if s.heads != t.heads), None):
                expected = f"a number of heads, as the student has {unequal[0]} in a block and the teacher {unequal[1]}"
                raise BadInput("relation_heads", None, expected)
        for option, outputs in {"student_stages": student, "teacher_stages": teacher}.items():
            for projections in self.projections[option]:
                query, *_ = projections.split([outputs.features[path] for path in projections.paths])
                if self.relation_heads is not None and (width := query[0, 0].numel()) % self.relation_heads:
                    whose = option.partition("_")[0]
                    expected = f"a divisor of {width}, the width of the {whose}'s queries"
                    raise BadInput("relation_heads", self.relation_heads, expected)

    def _check_tokens(self, student: Outputs, teacher: Outputs) -> None:
        """Raise BadInput if the nets cut an image into different numbers of tokens."""
        counts = [
            outputs.features[projections[0].paths[0]].shape[1]
            for outputs, projections in zip((student, teacher), self.projections.values(), strict=True)
        ]
        if counts[0] != counts[1]:
            expected = f"a teacher of {counts[0]} tokens an image, as the student has; it has {counts[1]}"
            raise BadInput("teacher_stages", self.stages["teacher_stages"], expected)

    def adapt(self, student: Outputs) -> Outputs:
        """Add the scores (b, T, heads, T) of each block, as `<relation>.<number>`."""
        return student.with_features(self._scores("student_stages", student.features))

    def condense(self, teacher: Outputs) -> Outputs:
        """Reduce the teacher's layers to scores (b, T, heads, T)."""
        return teacher._replace(features=self._scores("teacher_stages", teacher.features))

    def _scores(self, option: str, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scores = dict[str, Tensor]()
        for number, projections in enumerate(self.projections[option]):
            parts = projections.split([features[path] for path in projections.paths])
            scale = projections.scale_of(parts[0].shape[3])
            if self.relation_heads is not None:
                cut = [x.flatten(2).unflatten(2, (self.relation_heads, -1)) for x in parts]
                parts, scale = (cut[0], cut[1], cut[2]), cut[0].shape[3] ** -0.5
            for kind in self.kinds:
                left, right = (parts[i] for i in PAIRS[kind])
                scores[f"{kind}.{number}"] = products(left, right, scale)
        return scores

    def pairs_of(self, kind: str, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        """Return the scores of each pair of blocks, the student's first."""
        assert teacher is not None
        numbers = range(len(self.projections["student_stages"]))
        return [(student.features[f"{kind}.{i}"], teacher.features[f"{kind}.{i}"]) for i in numbers]

    def hide(self, scores: Tensor) -> Tensor:
        """Hide scores (b, T, heads, T) of later tokens, in texts."""
        return hide_later(scores) if self.causal else scores

    def average(self, values: Tensor) -> Tensor:
        """Return the values (b, T) of a text's tokens, or their mean (b,) of an image."""
        return values if self.causal else values.mean(1)


class MiniLM(RelationObjective):
    """Sum over relations of weight * mean over blocks and heads of KL(R_t || R_s), + ce_weight * CE, for each token.

    R are distributions of a token over itself and earlier ones, softmax(a b^T / sqrt(d)): of queries a and keys b the
    attention, of values a = b the value relation, likewise of queries, and of keys. Positions are in queries and keys
    as attention has them. In an image they are over all tokens, and the value is the mean over tokens. Blocks are
    paired by `student_stages` and `teacher_stages`; by default the last of both.

    Source: Wang et al. 2020, "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of Pre-Trained
    Transformers" (arXiv:2002.10957), equations 6 to 9, of the last blocks; with `relation_heads`, Wang et al. 2021,
    "MiniLMv2" (arXiv:2012.15828), whose relations are those of queries, keys and values, of an upper block.

    Args:
        attention_weight: weight of the attention's divergence.
        value_weight: that of values.
        query_weight: that of queries.
        key_weight: that of keys.
        ce_weight: weight of the cross-entropy with the labels.
        relation_heads: that of RelationObjective.

    Raises:
        BadInput: in `choose`, a layer is no block whose attention is known; in `build`, heads don't fit.
    """

    search = space(attention_weight=Log(0.1, 10), value_weight=Log(0.1, 10), ce_weight=Log(0.1, 10))

    def __init__(
        self,
        attention_weight: float = 1.0,
        value_weight: float = 1.0,
        query_weight: float = 0.0,
        key_weight: float = 0.0,
        ce_weight: float = 1.0,
        relation_heads: int | None = None,
        **layers: Any,
    ) -> None:
        super().__init__(relation_heads, **layers)
        self.attention_weight = weight("attention_weight", attention_weight)
        self.value_weight, self.query_weight = (
            weight("value_weight", value_weight),
            weight("query_weight", query_weight),
        )
        self.key_weight = weight("key_weight", key_weight)
        self.kinds = tuple(kind for kind in ("attention", "value", "query", "key") if self._weight(kind))
        self.ce_weight = weight("ce_weight", ce_weight)

    def _weight(self, kind: str) -> float:
        return float(getattr(self, f"{kind}_weight"))

    def choose_blocks(self, student: nn.Module, teacher: nn.Module) -> None:
        if not any(self.stages.values()):
            self.student_layers, self.teacher_layers = (number_layers(option, ["stage-1"]) for option in self.stages)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        terms = dict[str, Term]()
        for kind in self.kinds:
            pairs = [
                (self.hide(s).log_softmax(-1), self.hide(t).log_softmax(-1))
                for s, t in self.pairs_of(kind, student, teacher)
            ]
            values = torch.stack([divergence(log_t, log_s).mean(-1) for log_s, log_t in pairs]).mean(0)  # (b, T)
            terms[kind] = Term(self.average(values), self._weight(kind))
        return {**terms, "ce": ce_term(student, labels, self.ce_weight)}


class AttentionScores(RelationObjective):
    """attention_weight * mean over blocks, heads and places of (a_s - a_t)^2 + ce_weight * CE, for each token.

    a are the scores q k^T / sqrt(d) of a token with itself and earlier ones, before the softmax; in an image with all
    tokens, and the value is the mean over tokens. Blocks are paired by `student_stages` and `teacher_stages`; by
    default block m of the student's M with m N / M of the teacher's N.

    Source: Jiao et al. 2020, "TinyBERT: Distilling BERT for Natural Language Understanding" (arXiv:1909.10351),
    equation 7, with its uniform map of layers; `Sum` joins it with HiddenStates, equation 8.

    Args:
        attention_weight: weight of the squared difference.
        ce_weight: weight of the cross-entropy with the labels.
        relation_heads: that of RelationObjective.

    Raises:
        BadInput: in `choose`, a layer is no block whose attention is known; in `build`, heads don't fit.
    """

    kinds = ("attention",)
    search = space(attention_weight=Log(0.01, 10))

    def __init__(
        self, attention_weight: float = 1.0, ce_weight: float = 1.0, relation_heads: int | None = None, **layers: Any
    ) -> None:
        super().__init__(relation_heads, **layers)
        self.attention_weight = weight("attention_weight", attention_weight)
        self.ce_weight = weight("ce_weight", ce_weight)

    def choose_blocks(self, student: nn.Module, teacher: nn.Module) -> None:
        if any(self.stages.values()):
            return
        ours, theirs = block_names(student), block_names(teacher)
        ours = ours[-len(theirs) :]
        self.student_layers = number_layers("student_stages", ours)
        numbers = match_blocks(student, len(ours), len(theirs))
        self.teacher_layers = number_layers("teacher_stages", [theirs[number - 1] for number in numbers])

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        gaps = [(s - t).square().mean(2) for s, t in self.pairs_of("attention", student, teacher)]  # (b, T, T)
        gap = torch.stack(gaps).mean(0)
        if self.causal:
            values = gap.tril().sum(-1) / torch.arange(1, gap.shape[1] + 1, device=gap.device)
        else:
            values = gap.mean(-1)
        attention = Term(self.average(values), self.attention_weight)
        return {"attention": attention, "ce": ce_term(student, labels, self.ce_weight)}
