"""Generalised knowledge distillation of language models (GKD, Agarwal et al. 2024)."""

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.jensen_shannon import generalized_jsd
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Linear, Log, space
from lit_modules.objectives.top_k import DISJOINT


class GKD(LogitObjective):
    """gkd_weight * T^2 * JSD_beta(p_t, p_s) + ce_weight * CE, with p = softmax(z / T).

    JSD_beta is beta KL(p_t || m) + (1 - beta) KL(p_s || m), m = beta p_t + (1 - beta) p_s; at its ends it is not this
    formula, which would be 0, but KL(p_t || p_s) for beta 0 and KL(p_s || p_t) for beta 1, as in TRL.

    Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649), equation 1. TRL's loss
    is this one at T 1; it has no factor T^2.

    With `on_policy` the student continues the prompts of a share of the batches, drawn as in the paper for a whole
    batch, and learns from what it wrote, by the divergence alone: `ce_weight` is for the data's responses. No gradient
    flows through the draws.

    Args:
        beta: the teacher's share of the mixture, 0 to 1.
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        gkd_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
        on_policy: the paper's lambda, the share of batches with the student's own responses, 0 to 1.
        max_new_tokens: of such a response at most.
        sampling_temperature: divides the logits from which its tokens are drawn; 0 takes the likeliest.
        every: steps of the optimizer for which it writes at once, which is faster, with its weights of the first one.
    """

    tails = DISJOINT
    search = space(beta=Linear(0, 1), temperature=Log(0.5, 4), gkd_weight=Log(0.1, 10), ce_weight=Linear(0, 1))

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        gkd_weight: float = 1.0,
        ce_weight: float = 0.0,
        standardize: bool = False,
        on_policy: float = 0.0,
        max_new_tokens: int = 128,
        sampling_temperature: float = 1.0,
        every: int = 1,
    ) -> None:
        super().__init__(temperature, standardize)
        if not 0 <= on_policy <= 1:
            raise BadInput("on_policy", on_policy, "a number from 0 to 1")
        self.set_sampling(max_new_tokens, sampling_temperature)
        if every < 1 or (every > 1 and not on_policy):
            raise BadInput("every", every, "1 or more steps, and 1 without on_policy")
        self.on_policy, self.every = on_policy, every
        if not 0 <= beta <= 1:
            raise BadInput("beta", beta, "a number from 0 to 1")
        self.beta = beta
        self.gkd_weight, self.ce_weight = weight("gkd_weight", gkd_weight), weight("ce_weight", ce_weight)
        if on_policy and not gkd_weight:
            raise BadInput(
                "gkd_weight", gkd_weight, "above 0 beside on_policy: a student's own texts have no other loss"
            )

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        divergence = generalized_jsd(*self.log_probabilities(student, teacher), self.beta)
        gkd = Term(divergence * self.temperature**2, self.gkd_weight)
        return {"gkd": gkd, "ce": ce_term(student, labels, 0.0 if context.is_written else self.ce_weight)}
