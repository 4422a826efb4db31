"""Universal logit distillation: a teacher with other tokens (ULD, Boizard et al. 2024; GOLD, Patiño et al. 2025)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.other_tokens import OtherTokens
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.jensen_shannon import generalized_jsd
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.text_objective import TextObjective


class ULD(TextObjective):
    """sorted_weight * sum of |p_s - p_t| in decreasing order + direct_weight * JSD_beta of others + ce_weight * CE.

    Of a group of tokens that ends at one byte in both tokenizers, p are its tokens' probabilities but the last's
    multiplied with the distribution of the last. Tokens with the same text in both are compared directly, the rest in
    order of their probabilities. A group's value is that of its last token; other tokens have 0. A group with a token
    that is not learned does not count.

    Source: Boizard et al. 2024, "Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss for LLMs"
    (arXiv:2402.12030), whose loss is `match` false; Patiño et al. 2025, "Unlocking On-Policy Distillation for Any Model
    Family" (GOLD), as in TRL with the merging strategy "bayesian". TRL divides by the groups of each text, ours by the
    tokens of all.

    Args:
        match: compare tokens with the same text directly; else all are sorted.
        sorted_weight: weight of the distance of sorted probabilities.
        direct_weight: weight of the divergence of matched tokens.
        beta: the teacher's share of that divergence's mixture, as GKD has it.
        ce_weight: weight of the cross-entropy with the labels.

    Raises:
        BadInput: in `choose`, the teacher has the student's tokens.
    """

    relates_tokens = True
    any_tokenizer = True
    search = space(sorted_weight=Log(0.1, 10), direct_weight=Log(0.1, 10), ce_weight=Log(0.1, 10))

    def __init__(
        self,
        match: bool = True,
        sorted_weight: float = 1.0,
        direct_weight: float = 1.0,
        beta: float = 0.5,
        ce_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if not 0 <= beta <= 1:
            raise BadInput("beta", beta, "a number from 0 to 1")
        self.match, self.beta = match, beta
        self.sorted_weight, self.direct_weight = (
            weight("sorted_weight", sorted_weight),
            weight("direct_weight", direct_weight),
        )
        self.ce_weight = weight("ce_weight", ce_weight)
        self.matched: tuple[Tensor, Tensor] = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        if not isinstance(teacher, OtherTokens):
            expected = (
                "`teacher_tokenizer` beside it: a teacher with the student's tokens is compared by GKD and others"
            )
            raise BadInput("teacher", type(teacher).__name__, expected)
        if self.match:
            self.matched = teacher.matched

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        assert teacher is not None
        sizes, log_t = teacher.logits[..., 0].round().long().clamp(0, labels.shape[1]), teacher.logits[..., 1:]
        log_s = student.logits.log_softmax(-1)
        counted = torch.ones_like(labels, dtype=torch.bool) if context.counted is None else context.counted
        chosen = log_s.gather(-1, labels[..., None])[..., 0].where(counted, 0.0)
        row, last = ((sizes > 0) & counted).nonzero(as_tuple=True)
        first = last + 1 - sizes[row, last]
        # Of the places before each; sums over a long text would round at 32 bits.
        before, known = (F.pad(x.cumsum(1), (1, 0)) for x in (chosen.double(), counted.long()))
        whole = (first >= 0) & (known[row, last + 1] - known[row, first.clamp(min=0)] == sizes[row, last])
        row, last, first = row[whole], last[whole], first[whole]
        joint = (before[row, last] - before[row, first]).to(log_s.dtype)
        ours, theirs = log_s[row, last] + joint[:, None], log_t[row, last]
        places, zeros = (row, last), torch.zeros_like(chosen)
        values = {"sorted": _distance(ours, theirs, self.matched, labels.device)}
        weights = {"sorted": self.sorted_weight, "direct": self.direct_weight}
        if self.match:
            s, t = (x.to(labels.device) for x in self.matched)
            values["direct"] = generalized_jsd(ours[:, s], theirs[:, t], self.beta)
        terms = {name: Term(zeros.index_put(places, x), weights[name]) for name, x in values.items()}
        return {**terms, "ce": ce_term(student, labels, self.ce_weight)}


def _distance(ours: Tensor, theirs: Tensor, matched: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Return (n,), the differences of sorted probabilities, of logarithms (n, V) without matched tokens."""
    ordered = []
    for log_p, left_out in zip((ours, theirs), matched, strict=True):
        rest = torch.ones(log_p.shape[1], dtype=torch.bool, device=device)
        rest[left_out.to(device)] = False
        ordered.append(log_p[:, rest].exp().sort(-1, descending=True).values)
    width = max(x.shape[1] for x in ordered)
    s, t = (F.pad(x, (0, width - x.shape[1])) for x in ordered)
    return (s - t).abs().sum(-1)
