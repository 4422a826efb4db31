"""A teacher's distribution as it is stored, in k tokens, and a student's distribution over the same events.

Such a teacher's `Outputs` have `top_k`: the tokens and the mass of the others, with log-probabilities (b, T, k) in
place of logits (b, T, V); or tokens that were drawn from its distribution.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.outputs import Outputs

Tail = Literal["bucket", "sample", "renormalize"]
TAILS: tuple[str, ...] = get_args(Tail)
DISJOINT = "bucket", "renormalize"  # forms in which both nets have a distribution over the same events


def top_k_log_probabilities(student: Tensor, teacher: Outputs, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log p_s and log p_t (b, T, events) at a temperature, of a student's logits (b, T, V).

    With a tail the events are the k tokens and "any other token", k + 1 disjoint ones: both are distributions. Without
    one they are the k tokens, given that it is one of them. With drawn tokens p_t is 1 / k for each, and p_s that of
    the student's whole distribution: only what is linear in p_t, such as a cross-entropy, is unbiased.
    """
    z, stored = student / temperature, teacher.top_k
    assert stored
    if stored.tokens is None:
        drawn = stored.draws[temperature]
        log_s = F.log_softmax(z, -1).gather(-1, drawn)
        return log_s, torch.full_like(log_s, 1 / drawn.shape[-1]).log()
    tokens, tail = stored.tokens, stored.tails.get(temperature)
    picked, log_t = z.gather(-1, tokens), teacher.logits.to(z.dtype) / temperature
    if tail is not None:
        others = z.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
        picked = torch.cat([picked, others], -1)
        log_t = torch.cat([log_t, tail.to(z.dtype)[..., None]], -1)
    return F.log_softmax(picked, -1), F.log_softmax(log_t, -1)
