"""A GPT computes what its paper's formula says, sees no later token, and writes by its seed."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets import GPT, pipeline_stages
from tests.language import gpt


def tokens(*shape: int, seed: int = 0, vocab_size: int = 11) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def test_the_sizes_of_gpt_2_have_its_number_of_parameters() -> None:
    with torch.device("meta"):
        net = GPT(50257, 1024, 12, 12, 768)
    assert sum(p.numel() for p in net.parameters()) == 124_439_808
    assert net(torch.zeros(1, 3, dtype=torch.int64, device="meta")).shape == (1, 3, 50257)
    untied, tied = (sum(p.numel() for p in gpt(tie_weights=kind).parameters()) for kind in (False, True))
    assert untied == tied + 132


def formula(net: GPT, texts: torch.Tensor) -> torch.Tensor:
    """GPT-2's forward from the weights alone, written out plainly for each head."""
    w, heads = net.state_dict(), net.blocks[0].attention.num_heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embedding.tokens.weight"][texts] + w["embedding.positions.weight"][: texts.shape[1]]
    future = torch.ones(texts.shape[1], texts.shape[1], dtype=torch.bool).triu(1)
    for number in range(len(net.blocks)):
        name = f"blocks.{number}"
        q, k, v = linear(norm(x, f"{name}.norm1"), f"{name}.attention.qkv").chunk(3, -1)
        mixed = []
        for q_h, k_h, v_h in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
            scores = (q_h @ k_h.mT / math.sqrt(q_h.shape[-1])).masked_fill(future, -math.inf)
            mixed.append(scores.softmax(-1) @ v_h)
        x = x + linear(torch.cat(mixed, -1), f"{name}.attention.out")
        hidden = linear(norm(x, f"{name}.norm2"), f"{name}.mlp.0")
        x = x + linear(hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2, f"{name}.mlp.2")
    return norm(x, "norm") @ w["head.weight"].T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_formula(tied: bool) -> None:
    net = gpt(tie_weights=tied).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(10)  # first weights are so small that attention hardly matters
    texts = tokens(3, 16)
    torch.testing.assert_close(net(texts), formula(net, texts), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net(texts[:, :5].byte()), formula(net, texts[:, :5]), rtol=1e-10, atol=1e-10)
    composed = texts
    if not tied:
        for stage in pipeline_stages(net):
            composed = stage(composed)
        assert torch.equal(composed, net(texts))


def test_a_later_token_changes_no_earlier_logits() -> None:
    net, texts = gpt(), tokens(2, 16)
    before = net(texts)
    for place in (1, 7, 15):
        changed = texts.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = net(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:])


def test_first_weights_are_gpt_2s() -> None:
    net = gpt(vocab_size=500, block_size=300, num_layers=8, embed_dim=64)
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
            assert p.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name
    again = gpt(vocab_size=500, block_size=300, num_layers=8, embed_dim=64)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))


def test_dropout_is_where_gpt_2_has_it_and_each_layer_has_a_number() -> None:
    net = gpt(dropout=0.1, attention_dropout=0.2)
    of_weights = [block.attention.noise for block in net.blocks]
    layers = [m for m in net.modules() if isinstance(m, Dropout) and m not in of_weights]
    assert [m.layer for m in layers] == list(range(7))
    assert {m.p for m in layers} == {0.1}
    assert [m.layer for m in of_weights] == [2**16, 2**16 + 1, 2**16 + 2]
    assert {m.p for m in of_weights} == {0.2}


@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0}], ids=str)
def test_generation_with_a_cache_is_recomputation(options: dict[str, Any], length: int | None) -> None:
    net = gpt(dropout=0.5).double()  # in training, as it comes
    prompts = tokens(4, 3)
    cached = net.generate(prompts, length, seed=1, **options)
    assert torch.equal(cached, net.generate(prompts, length, seed=1, cached=False, **options))
    assert cached.shape == (4, 16 if length is None else 9)
    assert torch.equal(cached[:, :3], prompts)
    assert net.training
    if options.get("temperature") == 0:
        for end in range(3, cached.shape[1]):
            assert torch.equal(net.eval()(cached[:, :end])[:, -1].argmax(1), cached[:, end])


def test_generation_depends_on_its_seed_and_on_nothing_else() -> None:
    net, prompts = gpt(), tokens(3, 2)
    one = net.generate(prompts, seed=5)
    torch.rand(7)
    assert torch.equal(net.generate(prompts, seed=5), one)
    assert torch.equal(net.generate(prompts[:1], seed=5), one[:1])  # alone and in company
    assert not torch.equal(net.generate(prompts, seed=6), one)
    assert torch.equal(net.generate(prompts, top_k=1), net.generate(prompts, temperature=0))
    assert torch.equal(net.generate(prompts, seed=5, top_k=11), net.generate(prompts, seed=5))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    net = gpt().double()
    with torch.no_grad():
        net.head.weight.mul_(30)
    prompts = tokens(1, 4).expand(20_000, 4)
    likely = (net(prompts[:1])[0, -1] / 1.5).softmax(0)
    assert 0.2 < likely.max() < 0.7
    drawn = net.generate(prompts, 1, temperature=1.5)[:, -1]
    torch.testing.assert_close(drawn.bincount(minlength=11) / 20_000, likely, rtol=0, atol=0.015, check_dtype=False)
    best = likely.topk(2).indices
    narrow = net.generate(prompts, 1, temperature=1.5, top_k=2)[:, -1].bincount(minlength=11) / 20_000
    torch.testing.assert_close(narrow[best], likely[best] / likely[best].sum(), rtol=0, atol=0.015, check_dtype=False)
    assert narrow[best].sum() == 1


def test_generation_stops_at_the_block_size() -> None:
    net = gpt()
    assert net.generate(tokens(1, 2), 1000).shape == (1, 16)
    assert torch.equal(net.generate(tokens(2, 16)), tokens(2, 16))
    assert net.generate(tokens(0, 2)).shape == (0, 16)
    for prompts in (tokens(1, 17), tokens(1, 0)):
        with pytest.raises(ValueError, match=r"tokens \(1, \d+\): expected prompts of 1 to 16 tokens"):
            net.generate(prompts)


def test_what_can_not_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens \(2, 17\): expected texts of at most 16, the block size"):
        gpt()(tokens(2, 17))
    for name, value in {"length": -1, "temperature": -0.1, "top_k": 0}.items():
        with pytest.raises(ValueError, match=f"{name} {value}: expected"):
            gpt().generate(tokens(1, 1), **{name: value})
    with pytest.raises(BadInput, match="tie_weights=False"):
        pipeline_stages(gpt())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch 2.11's own
def test_compiled_it_gives_the_same_losses_and_gradients() -> None:
    found = []
    for compiled in (False, True):
        net, texts = gpt(num_layers=1), tokens(4, 9)
        if compiled:
            net.compile(dynamic=False)
        loss = F.cross_entropy(net(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
        assert dict(net.named_parameters()).keys() == dict(gpt(num_layers=1).named_parameters()).keys()
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
