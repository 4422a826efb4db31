"""How far logits are from those expected: of a file that was read again, or of a net that was compiled."""

from dataclasses import dataclass

from torch import Tensor

FLOAT_MARGIN, FLOAT_SHARE = 1e-4, 1e-3  # of the top two logits; of the logits' range
INT8_SHARE, INT8_MARGIN = 1e-3, 0.02  # of predictions; of the logits' range: kernels round differently
NOT_FINITE = "its logits are not finite"


@dataclass(frozen=True)
class Difference:
    """How a file's logits on the test set differ from the net's."""

    predictions: int  # that are of another class
    max_logit_difference: float


def compare(expected: Tensor, logits: Tensor) -> Difference:
    """Compare logits (N, classes) with those expected."""
    differ = int((expected.argmax(1) != logits.argmax(1)).sum())
    return Difference(differ, float((expected - logits).abs().max()))


def disagreement(expected: Tensor, logits: Tensor, exact: bool, share: float = INT8_SHARE) -> str:
    """Say what is wrong with logits (N, classes), compared with those expected; empty if nothing is.

    If `exact`, predictions may differ only where the top two logits are closer than 1e-4, and no logit by more than
    0.1 % of their range; else a share of predictions may, where they are closer than 2 % of it.
    """
    differ = expected.argmax(1) != logits.argmax(1)
    top = expected.topk(2, 1).values
    margins = (top[:, 0] - top[:, 1])[differ]
    extent = float(expected.max() - expected.min())
    allowed = FLOAT_MARGIN if exact else INT8_MARGIN * extent
    if not logits.isfinite().all():
        return NOT_FINITE
    if len(margins) and (apart := float(margins.max())) >= allowed:
        return f"a prediction differs whose top two logits are {apart:.2g} apart, not below {allowed:.2g}"
    most = compare(expected, logits).max_logit_difference
    if exact and most > max(FLOAT_SHARE * extent, FLOAT_MARGIN):
        return f"a logit differs by {most:.2g}, more than {FLOAT_SHARE:.1%} of their range"
    if not exact and len(margins) > share * len(expected):
        return f"{len(margins)} of {len(expected)} predictions differ, more than {share:.1%}"
    return ""
