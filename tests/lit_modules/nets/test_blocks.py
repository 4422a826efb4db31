"""Norms, MLPs and blocks compute what their formulas say, in float64, with gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.keyed import noise, with_seed
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.mlps import GeluMLP, MixtureOfExperts, SwiGLU, gated_width, token_mlp
from lit_modules.nets.norms import RMSNorm, token_norm
from lit_modules.nets.transformer import Block
from tests.attention import noise as draw
from tests.attention import rms
from tests.commands import bad_input

D = 16


def check(module: nn.Module, formula: Any, x: Tensor, tolerance: float = 1e-12) -> None:
    """Outputs, and gradients of inputs and of all parameters, are those of the formula."""
    inputs = [x.requires_grad_(), *module.parameters()]
    ours, expected = module(x), formula(x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    pairs = (torch.autograd.grad(y.square().sum(), inputs) for y in (ours, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(offset: bool) -> None:
    norm = RMSNorm(D, unit_offset=offset).double()
    assert torch.equal(norm.weight, torch.full((D,), 0.0 if offset else 1.0))
    nn.init.normal_(norm.weight)
    check(norm, lambda x: rms(x, norm.weight + offset), draw(2, 3, D))
    # Of 16 bits: Llama rounds before the product with the weight, Gemma after it.
    x, norm = draw(9, D).bfloat16(), norm.bfloat16()
    normed = rms(x.float(), torch.ones(D))
    expected = norm.weight * normed.bfloat16() if not offset else (normed * (1 + norm.weight.float())).bfloat16()
    torch.testing.assert_close(norm(x), expected, rtol=8e-3, atol=0)
    assert norm(x).dtype == torch.bfloat16


def test_gated_mlps_have_llamas_width() -> None:
    with torch.device("meta"):
        assert SwiGLU(4096).gate.out_features == gated_width(4096) == 11008
    assert gated_width(128) == 344


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = x @ gate.T
    return (z / (1 + (-z).exp()) * (x @ up.T)) @ down.T


def tanh_gelu(x: Tensor) -> Tensor:
    return x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu", "geglu"])
def test_mlps(kind: Any) -> None:
    mlp: Any = token_mlp(kind, D, 24, bias=False).double()

    def formula(x: Tensor) -> Tensor:
        if kind == "swiglu":
            return swiglu(x, mlp.gate.weight, mlp.up.weight, mlp.down.weight)
        if kind == "geglu":
            return (tanh_gelu(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
        z = x @ mlp[0].weight.T
        return (tanh_gelu(z) if kind == "gelu_tanh" else z * (1 + torch.erf(z / math.sqrt(2))) / 2) @ mlp[2].weight.T

    check(mlp, formula, draw(2, 3, D))


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_token_goes_through_its_experts_alone(renormalise: bool) -> None:
    mlp = with_seed(0, lambda: MixtureOfExperts(D, 12, 5, 2, renormalise)).double()

    def formula(x: Tensor) -> Tensor:
        rows = []
        for token in x.flatten(0, 1):
            scores = (mlp.router.weight @ token).exp()
            shares = scores / scores.sum()
            best = sorted(range(5), key=lambda e: -float(shares[e].detach()))[:2]
            total = sum(shares[e] for e in best) if renormalise else 1.0
            parts = [shares[e] / total * swiglu(token, mlp.gate[e], mlp.up[e], mlp.down[e]) for e in best]
            rows.append(sum(parts))
        return torch.stack(rows).view_as(x)  # type: ignore[arg-type]

    check(mlp, formula, draw(2, 7, D))
    x = draw(2, 7, D)
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="eager")(x), mlp(x), rtol=0, atol=1e-12)
    assert mlp(x[:0]).shape == (0, 7, D)


def test_noise_of_a_router_is_keyed_to_the_rows() -> None:
    mlp, x = with_seed(0, lambda: MixtureOfExperts(D, 12, 5, 2, noise=0.3, layer=1)).double(), draw(6, 7, D)
    with noise(seed=3, step=1, rows=torch.arange(6)):
        whole = mlp(x)
    with noise(seed=3, step=1, rows=torch.arange(2, 5)):
        torch.testing.assert_close(mlp(x[2:5]), whole[2:5], rtol=0, atol=1e-12)
    assert not torch.equal(whole, mlp.eval()(x))
    drawn: list[Tensor] = []
    mlp.train().router.register_forward_pre_hook(lambda _, inputs: drawn.append(inputs[0] / x))
    with noise(seed=3, step=1, rows=torch.arange(6)):
        mlp(x)
    assert 0.7 <= drawn[0].min() < 0.72
    assert 1.28 < drawn[0].max() <= 1.3


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("place", ["pre", "post", "sandwich", "after"])
def test_norms_stand_where_the_block_says(place: Any, scale: float | None) -> None:
    block: Any = Block(
        SelfAttention(D, 2, causal=True), mlp=SwiGLU(D, 24), make_norm=partial(RMSNorm, D), norm_place=place,
        layer_scale=scale,
    ).double()  # fmt: skip
    assert scale is None or block.layer_scale2.gamma.eq(scale).all()
    for p in block.parameters():
        nn.init.normal_(p, std=0.4)

    def formula(x: Tensor) -> Tensor:
        norms = {name: partial(rms, weight=m.weight) for name, m in block.named_children() if "norm" in name}
        same = nn.Identity()
        for n, part in ((1, block.attention), (2, block.mlp)):
            norm, after = norms[f"norm{n}"], norms.get(f"norm{n}_after", same)
            gamma = 1 if scale is None else getattr(block, f"layer_scale{n}").gamma
            if place == "post":
                x = norm(x + gamma * part(x))
            elif place == "after":
                x = x + gamma * norm(part(x))
            else:
                x = x + gamma * after(part(norm(x)))
        return x

    check(block, formula, draw(2, 5, D), 1e-10)


def test_a_post_norm_block_is_torchs() -> None:
    block = Block(SelfAttention(D, 2), 2, norm_place="post").double()
    other = nn.TransformerEncoderLayer(D, 2, 2 * D, 0, "gelu", batch_first=True).double()
    names = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.",
             "linear1.": "mlp.0.", "linear2.": "mlp.2."}  # fmt: skip
    state = {}
    for key, value in other.state_dict().items():
        ours = key
        for theirs, name in names.items():
            ours = ours.replace(theirs, name)
        state[ours] = value
    block.load_state_dict(state)
    torch.testing.assert_close(block(x := draw(2, 5, D)), other(x), rtol=0, atol=1e-12)


def test_what_can_not_be_made_is_refused() -> None:
    assert bad_input(MixtureOfExperts, D, 8, 4, 5) == "top_k 5: expected 1 to 4, the experts"
    assert bad_input(token_norm, "batch", D, 1e-5) == "norm batch: expected layer or rms"
    assert bad_input(token_norm, "layer", D, 1e-5, unit_offset=True).startswith("unit_offset True: expected false")
    assert bad_input(token_mlp, "relu", D, None, True).startswith("mlp relu: expected gelu, ")
    assert (
        bad_input(Block, SelfAttention(D, 2), norm_place="x") == "norm_place x: expected pre, post, sandwich or after"
    )
    assert isinstance(Block(SelfAttention(D, 2)).mlp, GeluMLP)
