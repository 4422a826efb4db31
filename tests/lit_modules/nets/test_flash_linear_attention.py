"""Our three forms of linear attention are flash-linear-attention's plain ones, up to the float32 of these."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention_rivals import naive
from lit_modules.nets.attention import delta, gated, linear

LENGTH = 128  # two chunks of theirs
pytestmark = pytest.mark.extras("fla", "einops")


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def turned(*tensors: Tensor) -> list[Tensor]:
    """(B, H, T, d) as (B, T, H, d)."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def assert_same(ours: tuple[Tensor, Tensor], output: Tensor, state: Tensor | None = None) -> None:
    torch.testing.assert_close(ours[0], output.transpose(1, 2), rtol=2e-5, atol=2e-5)
    if state is not None:
        torch.testing.assert_close(ours[1], state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_linear(form: str) -> None:
    theirs = naive("linear_attn")
    q, k, v = noise(3, 2, 3, LENGTH, 8).unbind()
    q, k = F.elu(q) + 1, F.elu(k) + 1
    ours = getattr(linear, form)(q, k, v)
    output, (state, sums) = theirs.naive_recurrent_linear_attn(
        *turned(q, k, v), normalize=True, output_final_state=True
    )
    assert_same(ours, output, torch.cat([state, sums.transpose(1, 2).mT], 3))
    assert_same(ours, theirs.naive_chunk_linear_attn(*turned(q, k, v), normalize=True))


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_gated(form: str) -> None:
    q, k, v, g, state = (*noise(4, 2, 3, LENGTH, 8).unbind(), noise(2, 3, 8, 8))
    g = F.logsigmoid(g) / 16
    ours = getattr(gated, form)(q, k, v, g, state)
    assert_same(ours, *naive("gla").naive_recurrent_gla(*turned(q, k, v, g), state, output_final_state=True))


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
@pytest.mark.parametrize("decays", [True, False])
def test_delta(form: str, decays: bool) -> None:
    q, k, v, g, state = (*noise(4, 2, 3, LENGTH, 8).unbind(), noise(2, 3, 8, 8))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta, decay = g[..., 0].sigmoid(), F.logsigmoid(g[..., 1]) * decays
    ours = getattr(delta, form)(q, k, v, beta, decay, state)
    theirs, options = naive("gated_delta_rule"), {"initial_state": state, "output_final_state": True}
    assert_same(ours, *theirs.naive_recurrent_gated_delta_rule(*turned(q, k, v, beta, decay), **options))
    assert_same(ours, *theirs.naive_chunk_gated_delta_rule(*turned(q, k, v, decay, beta), **options))
    if not decays:
        output, last = naive("delta_rule").delta_rule_recurrence(q, k, v, beta, state)
        assert_same(ours, output.transpose(1, 2), last)
