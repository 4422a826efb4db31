"""Kullback-Leibler divergence per sample."""

from torch import Tensor
from torch.nn import functional as F

from lit_modules.objectives.base import per_sample


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(b,) of KL(p || q) = sum of p (log p - log q) from log-probabilities (b, ..., classes); for tokens the mean."""
    return per_sample(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))


def softened_kl(z_p: Tensor, z_q: Tensor, temperature: float) -> Tensor:
    """(b,) of T^2 * KL(softmax(z_p / T) || softmax(z_q / T)); T^2 keeps the gradients' size.

    z_p and z_q are logits (b, ..., classes).
    """
    log_p, log_q = (F.log_softmax(z / temperature, -1) for z in (z_p, z_q))
    return kl(log_p, log_q) * temperature**2
