"""Losses of objectives beside formulas that are written out from their papers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_modules.objectives import Term


def total(terms: Mapping[str, Term]) -> Tensor:
    """The loss of a batch: the weighted means of its terms."""
    return sum((term.values.mean() * term.weight for term in terms.values()), start=torch.zeros(()))


def assert_equal(
    ours: Tensor,
    theirs: Tensor,
    inputs: Tensor | Sequence[Tensor],
    rtol: float = 0.0,
    atol: float = 1e-12,
    loss: Mapping[str, float] | None = None,
) -> None:
    """Two losses, and their gradients by the inputs, which may be absent in both; `loss` has tolerances of its own."""
    torch.testing.assert_close(ours, theirs, **loss or {"rtol": rtol, "atol": atol})
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    found, expected = (
        torch.autograd.grad(x.sum(), inputs, retain_graph=True, allow_unused=True) for x in (ours, theirs)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
