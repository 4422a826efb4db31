"""Attention maps of whole nets, against the formula written out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets import GPT, DeepNN, ViT, attention_maps
from tests.language import gpt

B, T, V = 2, 6, 11


def written_out(block: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    """The weights (B, H, T, T) of a pre-norm block for its input (B, T, D), of pairs that are not hidden."""
    y, heads = F.layer_norm(x, x.shape[-1:], block.norm1.weight, block.norm1.bias, block.norm1.eps), 2
    joined = y @ block.attention.qkv.weight.mT + block.attention.qkv.bias
    query, key, _ = (part.view(*x.shape[:2], heads, -1).transpose(1, 2) for part in joined.chunk(3, -1))
    return (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)


def check(net: Any, x: Tensor, hidden: Tensor, maps: dict[str, Tensor], mask: Tensor | None = None) -> None:
    assert [*maps] == [f"blocks.{number}.attention" for number in range(len(net.blocks))]
    for block, weights in zip(net.blocks, maps.values(), strict=True):
        torch.testing.assert_close(weights, written_out(block, x, hidden), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)
        assert weights.std() > 0.05
        x = block(x, mask=mask)


def spread(net: nn.Module) -> Any:
    """In float64, with weights so large that attention is not even."""
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=1.0)
    return net.double()


def test_maps_of_gpt_are_the_formula_of_each_block_and_leave_the_net_as_it_is() -> None:
    net = spread(gpt(V, T, num_layers=3, embed_dim=8, num_heads=2, dropout=0.5)).train()
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    maps = attention_maps(net, tokens)
    assert net.training
    assert not any(weights.requires_grad for weights in maps.values())
    assert not any(module._forward_pre_hooks for module in net.modules())
    net.eval()
    check(net, net.embedding(tokens), torch.ones(T, T).triu(1).bool(), maps)

    starts = torch.tensor([[0, 0, 2, 2, 2, 2], [0] * T])  # row 0 holds two texts
    mask = ((starts[:, :, None] == starts[:, None]) & torch.ones(T, T).tril().bool())[:, None]
    check(net, net.embedding(tokens, starts=starts), ~mask, attention_maps(net, tokens, starts), mask)


def test_maps_of_vit_have_all_tokens() -> None:
    net = spread(ViT(2, 8, num_layers=2, num_heads=2, input_shape=(1, 4, 6), distillation_token=True)).eval()
    images = torch.randn(B, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    maps = attention_maps(net, images)  # float32, which the net's type replaces
    check(net, net.embedding(images.double()), torch.zeros(8, 8, dtype=torch.bool), maps)


def test_all_mixers_have_maps_and_other_nets_are_refused() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    hybrid = GPT(V, T, num_layers=4, num_heads=2, embed_dim=8, mixer="delta", softmax_every=2)
    assert [*attention_maps(hybrid, tokens)] == [f"blocks.{number}.attention" for number in range(4)]
    for mixer in ("latent", "differential", "windowed", "linear", "gated", "delta"):
        maps = attention_maps(GPT(V, T, num_layers=1, num_heads=2, embed_dim=8, mixer=mixer), tokens)
        assert [weights.shape[2:] for weights in maps.values()] == [(4, 4)], mixer
    with pytest.raises(BadInput, match=r"^net DeepNN: expected GPT, ViT, or a net of their blocks"):
        attention_maps(DeepNN(), torch.zeros(1, 3, 32, 32))
