"""Kullback and Leibler's divergence, a value per sample."""

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


def softened_kl(z_p: Tensor, z_q: Tensor, temperature: float) -> Tensor:
    """(b,) of T^2 * KL(softmax(z_p / T) || softmax(z_q / T)); the factor T^2 keeps the gradients' size.

    Args:
        z_p: (b, ..., classes) logits.
        z_q: the same of the other distribution.
        temperature: T.
    """
    log_p, log_q = (F.log_softmax(z / temperature, -1) for z in (z_p, z_q))
    return kl(log_p, log_q) * temperature**2
