"""A teacher's distribution as it is stored, in k tokens, and a student's distribution over the same events.

In place of logits (b, T, V) such a teacher's `Outputs` have log-probabilities (b, T, k), and as features the tokens to
which they belong and the mass of the others; or tokens that were drawn from its distribution.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.base import Outputs

Tail = Literal["bucket", "sample", "renormalize"]
TAILS: tuple[str, ...] = get_args(Tail)
DISJOINT = "bucket", "renormalize"  # forms in which both nets have a distribution over the same events
TOKENS = "top_k"  # the feature that holds the tokens (b, T, k) int64


def tail_at(temperature: float) -> str:
    """Name the feature (b, T), the logarithm of the sum of p^(1/temperature) over the tokens that are not stored."""
    return f"{TOKENS} tail {float(temperature)!r}"


def draws_at(temperature: float) -> str:
    """Name the feature (b, T, k) int64, tokens that were drawn from the distribution at a temperature."""
    return f"{TOKENS} draws {float(temperature)!r}"


def is_top_k(teacher: Outputs) -> bool:
    """Return whether a teacher's outputs are of k tokens instead of all."""
    return TOKENS in teacher.features or has_draws(teacher.features)


def has_draws(features: Iterable[str]) -> bool:
    """Return whether these names of features are those of drawn tokens."""
    return any(path.startswith(f"{TOKENS} draws") for path in features)


def top_k_log_probabilities(student: Tensor, teacher: Outputs, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log p_s and log p_t (b, T, events) at a temperature, of a student's logits (b, T, V).

    With a tail the events are the k tokens and "any other token", k + 1 disjoint ones: both are distributions. Without
    one they are the k tokens, given that it is one of them. With drawn tokens p_t is 1 / k for each, and p_s that of
    the student's whole distribution: only what is linear in p_t, such as a cross-entropy, is unbiased.
    """
    z = student / temperature
    if has_draws(teacher.features):
        drawn = teacher.features[draws_at(temperature)]
        log_s = F.log_softmax(z, -1).gather(-1, drawn)
        return log_s, torch.full_like(log_s, 1 / drawn.shape[-1]).log()
    tokens, tail = teacher.features[TOKENS], teacher.features.get(tail_at(temperature))
    picked, log_t = z.gather(-1, tokens), teacher.logits.to(z.dtype) / temperature
    if tail is not None:
        others = z.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
        picked = torch.cat([picked, others], -1)
        log_t = torch.cat([log_t, tail.to(z.dtype)[..., None]], -1)
    return F.log_softmax(picked, -1), F.log_softmax(log_t, -1)
