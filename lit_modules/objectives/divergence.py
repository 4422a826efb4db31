"""Kullback and Leibler's divergence of log-probabilities, a value per sample."""

from torch import Tensor
from torch.nn import functional as F

from lit_modules.objectives.base import per_sample


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(b,) of KL(p || q) = sum of p (log p - log q); of tokens' (b, T, classes) a sample's mean.

    Args:
        log_p: (b, ..., classes) log-probabilities.
        log_q: the same of the other distribution.
    """
    return per_sample(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
