"""Cross-, latent and differential attention are their formulas, and those of transformers' models."""

import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets.attention.cross import CrossAttention
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.attention.positions import Alibi, Rotary
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.layers import run
from lit_modules.nets.projections import find_projections, hide_later, products
from tests import with_transformers
from tests.attention import assert_same, gradients, noise, rms
from tests.language import gpt

D, HEADS, M = 24, 4, 5


def make(kind: type[nn.Module], **options: Any) -> Any:
    net = with_seed(0, lambda: kind(D, HEADS, **options).double())
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name:
                p.mul_(torch.linspace(0.5, 2, len(p)))
    return net


def softmax_rows(scores: Tensor) -> Tensor:
    """Of rows, 0 where all scores are -inf."""
    exp = scores.exp()
    total = exp.sum(-1, keepdim=True)
    return exp / total.where(total > 0, 1)


def turn(x: Tensor, base: float = 10000.0) -> Tensor:
    """(T, d), rotated at places 0, 1, ..."""
    half = x.shape[1] // 2
    angles = torch.arange(len(x)).double()[:, None] * base ** (-torch.arange(half).double() / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], 1)


# Cross-attention

CROSS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other width": {"memory_dim": 10, "bias": False},
    "all": {"memory_dim": 10, "num_kv_heads": 2, "qk_norm": True, "softcap": 0.8, "head_dim": 5, "scale": 0.4},
}


def cross_formula(net: CrossAttention, x: Tensor, memory: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """(T, D) of x (T, D) and a memory (M, width); a mask (H, T, M) is added to scores."""
    d, groups, cap = (
        options.get("head_dim", D // HEADS),
        HEADS // options.get("num_kv_heads", HEADS),
        options.get("softcap"),
    )
    q = net.query(x).split(d, -1)
    k, v = (part.split(d, -1) for part in net.kv(memory).chunk(2, -1))
    mixed = []
    for h in range(HEADS):
        one, other = q[h], k[h // groups]
        if net.q_norm is not None:
            one, other = rms(one, net.q_norm.weight), rms(other, net.k_norm.weight)
        scores = options.get("scale", d**-0.5) * one @ other.T
        scores = (scores if cap is None else cap * (scores / cap).tanh()) + mask[h]
        mixed.append(softmax_rows(scores) @ v[h // groups])
    return net.out(torch.cat(mixed, -1))


@pytest.mark.parametrize("masked", ["not", "padding", "heads", "both"])
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_is_its_formula(name: str, masked: str) -> None:
    net = make(CrossAttention, **CROSS[name])
    x, memory = noise(2, 3, D).requires_grad_(), noise(2, M, CROSS[name].get("memory_dim", D)).requires_grad_()
    present = torch.tensor([[True] * 3 + [False] * 2, [False] * 5]) if masked in {"padding", "both"} else None
    mask = noise(2, HEADS, 3, M) if masked in {"heads", "both"} else None
    full = torch.zeros(2, HEADS, 3, M).double() if mask is None else mask
    full = full if present is None else full.masked_fill(~present[:, None, None], -math.inf)
    ours = net(x, net.remember(memory, present), mask)
    plain = torch.stack([cross_formula(net, *row, CROSS[name]) for row in zip(x, memory, full, strict=True)])
    assert_same([ours, *gradients(net, x, ours)], [plain, *gradients(net, x, plain)])
    one_by_one = [net(part, net.remember(memory, present), m) for part, m in zip(
        x.split(1, 1), [None] * 3 if mask is None else mask.split(1, 2), strict=True
    )]  # fmt: skip
    assert_same([torch.cat(one_by_one, 1)], [ours])
    if present is None and mask is None:
        assert torch.equal(net(x, memory), ours)


def test_cross_attention_is_torchs() -> None:
    net = make(CrossAttention, memory_dim=10)
    theirs = nn.MultiheadAttention(D, HEADS, kdim=10, vdim=10, batch_first=True).double()
    keys, values = net.kv.weight.chunk(2)
    theirs.load_state_dict({
        "q_proj_weight": net.query.weight, "k_proj_weight": keys, "v_proj_weight": values,
        "in_proj_bias": torch.cat([net.query.bias, net.kv.bias]),
        "out_proj.weight": net.out.weight, "out_proj.bias": net.out.bias,
    })  # fmt: skip
    x, memory, present = noise(2, 3, D), noise(2, M, 10), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    mixed, weights = theirs(x, memory, memory, key_padding_mask=~present, average_attn_weights=False)
    kept = net.remember(memory, present)
    assert_same([net(x, kept), net.weights(x, kept)], [mixed, weights])


# Latent attention

LATENT: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "ranks": {"causal": True, "kv_rank": 7, "query_rank": 9, "head_dim": 5, "rotary_dim": 4, "value_dim": 3},
    "wide values": {"causal": True, "head_dim": 3, "rotary_dim": 2, "value_dim": 8, "scale": 0.7, "bias": False},
}


def latent_formula(net: LatentAttention, x: Tensor, mask: Tensor) -> Tensor:
    """(T, D) of x (T, D); a mask (T, T) is added to scores."""
    asking = x if net.query_down is None else rms(net.query_down(x), net.query_norm.weight)
    c, shared = net.latent(x).split([net.kv_rank, net.rotary_dim], -1)
    c, shared, scale = rms(c, net.latent_norm.weight), turn(shared), (net.head_dim + net.rotary_dim) ** -0.5
    mixed = []
    for q, kv in zip(net.query(asking).chunk(HEADS, -1), net.expand(c).chunk(HEADS, -1), strict=True):
        k, v = kv[:, : net.head_dim], kv[:, net.head_dim :]
        scores = q[:, : net.head_dim] @ k.T + turn(q[:, net.head_dim :]) @ shared.T
        mixed.append(softmax_rows((net.form.scale or scale) * scores + mask) @ v)
    return net.out(torch.cat(mixed, -1))


def causal_mask(size: int) -> Tensor:
    return torch.full((size, size), -math.inf).double().triu(1)


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_its_formula(name: str) -> None:
    net, x = make(LatentAttention, **LATENT[name]), noise(2, 6, D).requires_grad_()
    ours, plain = net(x), torch.stack([latent_formula(net, text, causal_mask(6)) for text in x])
    assert_same([ours, *gradients(net, x, ours)], [plain, *gradients(net, x, plain)])


# Differential attention

DIFFERENTIAL: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "all": {
        "causal": True,
        "num_kv_heads": 2,
        "position": Rotary(),
        "head_dim": 4,
        "scale": 0.4,
        "layer": 3,
        "bias": False,
    },
}


def differential_formula(net: DifferentialAttention, x: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """(T, D) of x (T, D); a mask (T, T) is added to scores."""
    d, keys = net.head_dim, net.num_kv_heads
    heads = [*net.qkv(x).split(d, -1)]
    q, k, v = heads[:HEADS], heads[HEADS : HEADS + keys], heads[HEADS + keys :]
    if options.get("position"):
        q, k = [turn(part) for part in q], [turn(part) for part in k]
    start = 0.8 - 0.6 * math.exp(-0.3 * options.get("layer", 0))
    part = net.difference
    factor = (part.q1 @ part.k1).exp() - (part.q2 @ part.k2).exp() + start
    mixed = []
    for h in range(HEADS // 2):
        pairs = [(q[one], k[one // (HEADS // keys)]) for one in (h, h + HEADS // 2)]
        maps = [softmax_rows(options.get("scale", d**-0.5) * one @ other.T + mask) for one, other in pairs]
        pair = h // (HEADS // keys)
        wide = torch.cat([v[pair], v[pair + keys // 2]], -1)
        mixed.append((1 - start) * rms((maps[0] - factor * maps[1]) @ wide, eps=1e-5))
    return net.out(torch.cat(mixed, -1))


@pytest.mark.parametrize("name", DIFFERENTIAL)
def test_differential_attention_is_its_formula(name: str) -> None:
    options = DIFFERENTIAL[name]
    net, x = make(DifferentialAttention, **options), noise(2, 6, D).requires_grad_()
    ours, plain = net(x), torch.stack([differential_formula(net, text, causal_mask(6), options) for text in x])
    assert_same([ours, *gradients(net, x, ours)], [plain, *gradients(net, x, plain)])


# Both

CAUSAL: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"latent, {name}": (LatentAttention, options) for name, options in LATENT.items()},
    **{f"differential, {name}": (DifferentialAttention, options) for name, options in DIFFERENTIAL.items()},
}


@pytest.mark.parametrize("steps", [[1] * 7, [4, 1, 2], [2, 5]])
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_cached_equals_at_once(name: str, steps: list[int]) -> None:
    kind, options = CAUSAL[name]
    net, x = make(kind, **options), noise(2, 7, D)
    cache, padded = net.new_cache(7), net.new_cache(7, torch.tensor([2, 0]))
    assert_same([torch.cat([net(part, cache) for part in x.split(steps, 1)], 1)], [net(x)])
    assert sum(stored.nbytes for stored in cache._stored) == 2 * net.cache_bytes(7, 8)
    parts = torch.cat([net(part, padded) for part in x.split(steps, 1)], 1)
    assert_same([parts[0, 2:], parts[1]], [net(x[:1, 2:])[0], net(x[1:])[0]])


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_masks_hide_padding_and_other_texts(name: str) -> None:
    kind, options = CAUSAL[name]
    net, x = make(kind, **options), noise(2, 7, D)
    there = torch.arange(7) >= torch.tensor([[3], [0]])
    padded = net(x, mask=there)
    assert_same([padded[0, 3:], padded[1]], [net(x[:1, 3:])[0], net(x[1:])[0]])
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3]]).expand(2, -1)
    alone = torch.cat([net(x[:, :3]), net(x[:, 3:])], 1)
    assert_same([net(x, mask=mask_texts(starts))], [alone])
    assert_same(
        [net(x, mask=torch.zeros(1, 1, 7, 7).double().masked_fill(~mask_texts(starts[:1]), -math.inf))], [alone]
    )
    assert net.weights(x, there)[0, :, :3].abs().max() == 0


@pytest.mark.parametrize("name", ["latent, ranks", "differential, all", "cross"])
def test_traced_it_equals_eager(name: str) -> None:
    torch.compiler.reset()
    kind, options = CAUSAL.get(name, (CrossAttention, CROSS["all"]))
    net, x, memory = make(kind, **options), noise(2, 7, D).requires_grad_(), noise(2, M, 10)
    inputs = (x, memory) if name == "cross" else (x,)
    compiled, eager = torch.compile(net, fullgraph=True, backend="aot_eager")(*inputs), net(*inputs)
    assert_same([compiled, *gradients(net, x, compiled)], [eager, *gradients(net, x, eager)])


REFUSED: dict[str, tuple[Any, str]] = {
    "kv heads": (lambda: CrossAttention(D, HEADS, num_kv_heads=3), "num_kv_heads 3: expected a divisor of"),
    "memory": (lambda: make(CrossAttention)(noise(2, 3, D), noise(2, 4, 9)), "memory (2, 4, 9): expected (B, M, 24)"),
    "batch": (lambda: make(CrossAttention)(noise(2, 3, D), noise(3, 4, D)), "memory of 3 texts: expected 2, as many"),
    "padding": (
        lambda: make(CrossAttention).remember(noise(2, 4, D), torch.ones(2, 3).bool()),
        "present (2, 3): expected bool (2, 4), false for padding",
    ),
    "odd rotation": (lambda: LatentAttention(D, HEADS, rotary_dim=3), "rotary_dim 3: expected an even number above 0"),
    "rank": (lambda: LatentAttention(D, HEADS, kv_rank=0), "kv_rank 0: expected at least 1"),
    "no pairs": (lambda: DifferentialAttention(D, 3), "num_heads 3: expected an even number"),
    "one key": (lambda: DifferentialAttention(D, 4, num_kv_heads=1), "num_kv_heads 1: expected an even number"),
    "cache": (lambda: LatentAttention(D, HEADS).new_cache(3), "causal False: expected True"),
    "heads' mask": (
        lambda: make(DifferentialAttention)(noise(2, 3, D), mask=noise(2, HEADS, 3, 3)),
        "mask (2, 4, 3, 3): expected a mask that broadcasts to (B, H, T, keys), (2, 1, 3, 3)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_computed_is_refused(kind: str) -> None:
    call, message = REFUSED[kind]
    with pytest.raises(BadInput) as error:
        call()
    assert str(error.value).startswith(message)


# transformers


def precise(module: nn.Module) -> nn.Module:
    """In float64, transformers' norms too, which compute in float32."""
    for child in module.modules():
        if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
            child.forward = lambda x, norm=child: rms(x, norm.weight, norm.variance_epsilon)  # type: ignore[method-assign]
    return module.double()


def tables(size: int, width: int) -> tuple[Tensor, Tensor]:
    """Cos and sin (1, T, width) of transformers' rotations, in float64."""
    angles = torch.arange(size).double()[:, None] * 10000.0 ** (-torch.arange(width // 2).double() / (width // 2))
    return tuple(f(torch.cat([angles, angles], 1))[None] for f in (torch.cos, torch.sin))


def assert_same_layer(ours: nn.Module, theirs: nn.Module, *tolerance: float) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of both layers agree; returns inputs and outputs."""
    x = noise(2, 6, D).requires_grad_()
    found, expected = ours(x), theirs(x, tables(6, 4), causal_mask(6)[None, None])[0]
    assert_same(
        [found, *torch.autograd.grad(found.square().sum(), x)],
        [expected, *torch.autograd.grad(expected.square().sum(), x)],
        *tolerance,
    )
    return x, expected


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("interleaved", [False, True])
@with_transformers.in_fork
def test_latent_attention_is_deepseeks(interleaved: bool) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=9, kv_lora_rank=7,
        qk_rope_head_dim=4, qk_nope_head_dim=5, v_head_dim=3, attention_bias=False, rope_interleave=interleaved,
        attn_implementation="sdpa",
    )  # fmt: skip
    other = precise(with_seed(1, lambda: theirs.DeepseekV3Attention(config, 0)))
    net = make(LatentAttention, **LATENT["ranks"] | {"bias": False})
    pairs = torch.tensor([0, 2, 1, 3]) if interleaved else torch.arange(4)  # (2m, 2m + 1) to (m, m + d/2)
    query = torch.cat([torch.arange(5), 5 + pairs]) + 9 * torch.arange(HEADS)[:, None]
    w = other.state_dict()
    net.load_state_dict({
        "query_down.weight": w["q_a_proj.weight"], "query_norm.weight": w["q_a_layernorm.weight"],
        "query.weight": w["q_b_proj.weight"][query.flatten()],
        "latent.weight": w["kv_a_proj_with_mqa.weight"][torch.cat([torch.arange(7), 7 + pairs])],
        "latent_norm.weight": w["kv_a_layernorm.weight"], "expand.weight": w["kv_b_proj.weight"],
        "out.weight": w["o_proj.weight"],
    })  # fmt: skip
    x, expected = assert_same_layer(net, other)
    with torch.no_grad():
        cache = net.new_cache(6)
        assert_same([torch.cat([net(token, cache) for token in x.split(1, 1)], 1)], [expected])


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("layer", [0, 3])
@with_transformers.in_fork
def test_differential_attention_is_diffllamas(layer: int) -> None:
    from transformers.models.diffllama import modeling_diffllama as theirs

    config = theirs.DiffLlamaConfig(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=4, attn_implementation="sdpa",
    )  # fmt: skip
    other = precise(with_seed(1, lambda: theirs.DiffLlamaAttention(config, layer)))
    net = make(
        DifferentialAttention, causal=True, num_kv_heads=2, position=Rotary(), head_dim=4, layer=layer, bias=False
    )
    w = other.state_dict()
    net.load_state_dict({
        "qkv.weight": torch.cat([w[f"{name}_proj.weight"] for name in "qkv"]), "out.weight": w["o_proj.weight"],
        **{f"difference.{name}": w[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2")},
    })  # fmt: skip
    assert_same_layer(net, other, 2e-6)  # λ's sum of products is of float32 there


# What methods that compare attention read


def test_projections_give_the_weights_of_a_form() -> None:
    net, options = gpt(11, 8, num_layers=1, embed_dim=16, num_heads=4).double(), {"num_kv_heads": 2, "scale": 0.9}
    net.blocks[0].attention = SelfAttention(16, 4, True, position=Rotary(50.0), head_dim=6, **options).double()
    tokens = torch.arange(16).view(2, 8) % 11
    projections = find_projections(net, "blocks.0", "layer")
    features = run(net, tokens, {*projections.paths, "blocks.0.norm1"}).features
    query, key, _ = projections.split([features[path] for path in projections.paths])
    weights = hide_later(products(query, key, projections.scale_of(6))).softmax(-1)
    assert_same([weights.transpose(1, 2)], [net.blocks[0].attention.weights(features["blocks.0.norm1"])])


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (lambda: SelfAttention(16, 4, True, window=64, sinks=1), "without window"),
        (lambda: SelfAttention(16, 4, True, softcap=1000.0, position=Alibi()), "without softcap, alibi"),
        (lambda: SelfAttention(16, 4, True, qk_norm=True, gate=True), "without qk_norm, gate"),
        (lambda: DifferentialAttention(16, 4, True), "with softmax attention"),
    ],
)
def test_projections_of_a_form_that_a_short_text_hides_are_refused(attention: Any, message: str) -> None:
    net = gpt(11, 8, num_layers=1, embed_dim=16, num_heads=4)
    net.blocks[0].attention = attention()
    with pytest.raises(BadInput, match=f"layer blocks.0: expected a block of GPT.*, {message}$"):
        find_projections(net, "blocks.0", "layer")


def test_the_pages_examples_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "attention-layers.md").read_text()
    first, second, caches, third = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(first, "docs/attention-layers.md", "exec"), {})
    assert capsys.readouterr().out == "2304 2304\n"
    exec(compile(second, "docs/attention-layers.md", "exec"), {})
    size = "torch.Size([2, 10, 64])"
    assert capsys.readouterr().out == f"{size}\n{size} {4 * (24 + 8)}\n{size}\n"
    exec(compile(caches, "docs/attention-layers.md", "exec"), {})
    exec(compile(third, "docs/attention-layers.md", "exec"), {})
    assert capsys.readouterr().out == "6400 6400\n"


def test_the_pages_picture_is_what_the_layers_give() -> None:
    docs = Path(__file__).parents[3] / "docs"
    draw = runpy.run_path(str(docs / "attention_masks.py"))["draw"]
    assert draw() == (docs / "images" / "attention_masks.svg").read_text(), "python docs/attention_masks.py"
