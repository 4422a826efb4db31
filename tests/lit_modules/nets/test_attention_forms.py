"""Forms of softmax attention are what their formulas say, alone and combined, at once and cached."""

import math
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets import SelfAttention
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.attention.positions import Alibi, Rotary
from tests.attention import assert_same, formula, gradients, jagged, noise
from tests.grids import mostly_slow
from tests.lit_modules.nets.test_attention import compiled_equals_eager

D, HEADS = 24, 6
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "rotary": {"position": Rotary(100.0)},
    "linear": {"position": Rotary(100.0, {"rope_type": "linear", "factor": 3.0})},
    "yarn": {"position": Rotary(100.0, YARN)},
    "llama3": {"position": Rotary(100.0, LLAMA3), "head_dim": 16},
    "alibi": {"position": Alibi()},
    "window": {"window": 3},
    "sinks": {"window": 2, "sinks": 2},
    "qk_norm": {"qk_norm": True},
    "unit offset": {"qk_norm": True, "unit_offset": True, "norm_eps": 0.1},
    "width": {"qk_norm": "width", "num_kv_heads": 2, "position": Rotary(100.0)},
    "softcap": {"softcap": 0.7},
    "gate": {"gate": True},
    "sizes": {"head_dim": 6, "scale": 0.3},
    "gemma": {
        "num_kv_heads": 3, "position": Rotary(), "window": 3, "softcap": 0.7, "head_dim": 6, "scale": 0.3,
        "bias": False,
    },
    "all": {
        "num_kv_heads": 2, "position": Rotary(50.0), "window": 3, "sinks": 1, "qk_norm": True, "gate": True,
        "head_dim": 8, "scale": 0.5,
    },
    "alibi, grouped, window": {"position": Alibi(), "num_kv_heads": 3, "window": 3, "sinks": 1, "softcap": 0.7},
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
COMPILED = ["alibi", "gemma", "all"]


def attention(name: str, **options: Any) -> SelfAttention:
    made = {"causal": True} | FORMS[name] | options
    net = with_seed(0, lambda: SelfAttention(D, HEADS, **made).double())
    with torch.no_grad():
        for norm in (net.q_norm, net.k_norm):
            if norm is not None:
                norm.weight.mul_(torch.linspace(0.5, 2, len(norm.weight)))
    return net


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_its_formula(name: str) -> None:
    net, x = attention(name), noise(2, 6, D).requires_grad_()
    ours, plain = net(x), torch.stack([formula(net, text, FORMS[name]) for text in x])
    assert_same([ours, *gradients(net, x, ours)], [plain, *gradients(net, x, plain)])


@pytest.mark.parametrize("name", ["grouped", "yarn", "alibi", "qk_norm", "softcap", "gate"])
def test_a_form_that_is_not_causal_is_its_formula(name: str) -> None:
    net, x = attention(name, causal=False), noise(1, 5, D)
    assert_same([net(x)[0]], [formula(net, x[0], FORMS[name] | {"causal": False})])


MASKS = {
    "padding": lambda: torch.tensor([[False, True, True, True, True], [True, True, True, True, False]]),
    "texts": lambda: mask_texts(torch.tensor([[0, 0, 0, 3, 3], [0, 1, 1, 1, 1]])),
    "heads": lambda: noise(1, HEADS, 5, 5) > -0.5,
    "additive": lambda: noise(2, HEADS, 5, 5).masked_fill(noise(2, HEADS, 5, 5) > 1, -math.inf),
    "one of all": lambda: noise(1, 1, 5, 5),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", mostly_slow(["grouped", "softcap", "gate", "alibi"], "grouped", "alibi"))
def test_a_mask_is_that_of_the_formula(name: str, kind: str, causal: bool) -> None:
    """Also where it leaves a query nothing: the heads' output is 0 then."""
    net, x, mask = attention(name, causal=causal), noise(2, 5, D).requires_grad_(), MASKS[kind]()
    ours, full = net(x, mask=mask), mask[:, None, None] if mask.dim() == 2 else mask
    full = torch.zeros(full.shape).double().masked_fill(~full, -math.inf) if full.dtype == torch.bool else full
    options = FORMS[name] | {"causal": causal}
    plain = [formula(net, text, options, m) for text, m in zip(x, full.expand(2, HEADS, 5, 5), strict=True)]
    assert_same([ours, *gradients(net, x, ours)], [torch.stack(plain), *gradients(net, x, torch.stack(plain))])


@pytest.mark.parametrize("name", mostly_slow(FORMS, "rotary", "sinks", "alibi", "gemma", "all"))
def test_texts_in_one_row_are_as_alone(name: str) -> None:
    """Positions, windows and sinks are those of each text."""
    net, x = attention(name), noise(1, 11, D)
    starts = torch.tensor([[0] * 5 + [5] * 6])
    together = net(x, mask=mask_texts(starts))
    assert_same([together], [torch.cat([net(x[:, :5]), net(x[:, 5:])], 1)])


@pytest.mark.parametrize("name", mostly_slow(FORMS, "rotary", "sinks", "alibi", "gemma", "all"))
def test_padding_on_the_left_is_as_none(name: str) -> None:
    net, x = attention(name), noise(2, 8, D)
    there = torch.arange(8) >= torch.tensor([[3], [0]])
    padded = net(x, mask=there)
    assert_same([padded[0, 3:], padded[1]], [net(x[:1, 3:])[0], net(x[1:])[0]])


@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 1, 3], [2, 7], [1, 5, 3]])
@pytest.mark.parametrize("name", mostly_slow(FORMS, "rotary", "sinks", "alibi", "gemma", "all"))
@torch.no_grad()
def test_cached_equals_at_once(name: str, steps: list[int]) -> None:
    net, x = attention(name), noise(3, 9, D)
    padding = torch.tensor([0, 3, 1])
    alone = [net(text[None, first:])[0] for text, first in zip(x, padding.tolist(), strict=True)]
    for cache in (net.new_cache(12), Cache(9), net.new_cache(12, padding), Cache(9, padding)):
        parts = torch.cat([net(part, cache) for part in x.split(steps, 1)], 1)
        assert cache.length == 9
        if cache.padding is None:
            assert_same([parts], [net(x)])
        else:
            assert_same([text[first:] for text, first in zip(parts, padding.tolist(), strict=True)], alone)
            assert parts.isfinite().all()


@torch.no_grad()
def test_a_cache_takes_the_bytes_that_its_layer_says() -> None:
    for name in FORMS:
        net, x = attention(name), noise(1, 9, D)
        cache = net.new_cache(9)
        net(x, cache)
        assert sum(x.nbytes for x in cache._stored) == net.cache_bytes(9, 8)
    assert attention("all").cache_bytes(1000, 2) == 2 * 2 * 8 * (3 + 1) * 2
    assert attention("grouped").cache_bytes(1000, 2) == 2 * 2 * 4 * 1000 * 2


@pytest.mark.parametrize("name", mostly_slow(FORMS, "rotary", "sinks", "alibi", "gemma", "all"))
def test_weights_make_the_output(name: str) -> None:
    net, x = attention(name, gate=False), noise(2, 6, D)
    groups, d = HEADS // net.num_kv_heads, net.head_dim
    weights, value = net.weights(x), net.qkv(x)[..., -net.num_kv_heads * d :].unflatten(-1, (-1, d))
    mixed = torch.einsum("bhij,bjhd->bihd", weights, value.repeat_interleave(groups, 2))
    assert_same([net.out(mixed.flatten(2))], [net(x)])
    padded = net.weights(x, torch.tensor([[False] * 6, [True] * 6]))
    assert_same([padded], [torch.stack([torch.zeros_like(weights[0]), weights[1]])])


@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("name", ["all", "alibi"])
@torch.no_grad()
def test_kernels_agree(name: str, backend: Any) -> None:
    net, x = attention(name, backend=backend), noise(2, 7, D)
    assert_same([net(x)], [attention(name)(x)])
    assert_same(
        [net(x, mask=MASKS["heads"]().repeat(1, 1, 2, 2)[:, :, :7, :7])],
        [attention(name)(x, mask=MASKS["heads"]().repeat(1, 1, 2, 2)[:, :, :7, :7])],
    )


@pytest.mark.parametrize("name", mostly_slow(COMPILED, "all"))
def test_traced_a_form_equals_eager(name: str) -> None:
    compiled_equals_eager(attention(name))


def test_rounded_inputs_keep_their_type() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name in FORMS:
            net, x = attention(name).to(dtype), noise(1, 5, D).to(dtype)
            error = (net(x).double() - attention(name)(x.double())).abs().max()
            assert net(x).dtype == dtype
            assert error < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["all", "alibi, grouped, window"])
@torch.no_grad()
def test_autocast_serves_a_cache_and_a_mask(name: str) -> None:
    """A norm's keys are of 32 bits there, and values of 16."""
    net, x = attention(name).float(), noise(2, 7, D).float()
    cache = net.new_cache(7)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = [net(x), torch.cat([net(part, cache) for part in x.split([4, 1, 2], 1)], 1)]
        assert net(x, mask=noise(1, 1, 7, 7).float()).dtype == torch.bfloat16
    assert_same([y.float() for y in rounded], [net(x), net(x)], 0.05)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv heads": ({"num_kv_heads": 4}, "num_kv_heads 4: expected a divisor of num_heads, 6"),
    "no kv heads": ({"num_kv_heads": 0}, "num_kv_heads 0: expected a divisor"),
    "head": ({"head_dim": 0}, "head_dim 0: expected at least 1"),
    "odd head": (
        {"head_dim": 5, "position": Rotary()},
        "position Rotary: expected heads of an even width; theirs is 5",
    ),
    "window": ({"window": 0}, "window 0: expected at least 1, the token itself"),
    "window of all": ({"window": 4, "causal": False}, "window 4: expected None, but for causal attention"),
    "sinks": ({"sinks": 2}, "sinks 2: expected 0 without a window"),
    "fewer sinks": ({"sinks": -1, "window": 3}, "sinks -1: expected at least 0"),
    "softcap": ({"softcap": 0.0}, "softcap 0.0: expected a number above 0, or None"),
    "softcap in flash": (
        {"softcap": 1.0, "backend": "flash"},
        "backend flash: expected auto, math or flex: no other kernel",
    ),
    "scale": ({"scale": -1.0}, "scale -1.0: expected a number above 0"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_combined_is_refused(kind: str) -> None:
    options, message = REFUSED[kind]
    with pytest.raises(BadInput) as error:
        SelfAttention(D, HEADS, **{"causal": True} | options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("base", "scaling", "message"),
    [
        (1.0, None, "base 1.0: expected more than 1"),
        (
            10.0,
            {"rope_type": "dynamic", "factor": 2.0},
            "scaling dynamic: expected rope_type default, linear, llama3, yarn",
        ),
        (10.0, {"rope_type": "linear"}, "scaling []: expected for linear: factor"),
        (
            10.0,
            YARN | {"faktor": 1.0},
            "scaling ['factor', 'faktor', 'original_max_position_embeddings']: expected for",
        ),
        (10.0, {"rope_type": "linear", "factor": 0}, "scaling.factor 0: expected a number above 0"),
        (10.0, {"rope_type": "default", "rope_theta": 20.0}, "scaling.rope_theta 20.0: expected base, 10.0"),
    ],
)
def test_rotations_that_are_not_known_are_refused(base: float, scaling: Any, message: str) -> None:
    with pytest.raises(BadInput) as error:
        Rotary(base, scaling)
    assert str(error.value).startswith(message)


@torch.no_grad()
def test_inputs_that_a_form_cannot_serve_are_refused() -> None:
    net, x = attention("sinks"), noise(2, 5, D)
    for mask in (torch.ones(5, 5).bool(), torch.ones(2, 5, 5).bool(), noise(2, 4, 5, 5), noise(5, 5)):
        with pytest.raises(
            BadInput, match=r"mask \(.*\): expected a mask that broadcasts to \(B, H, T, keys\), \(2, 6, 5"
        ):
            net(x, mask=mask)
    with pytest.raises(BadInput, match=r"mask torch.int64: expected bool"):
        net(x, mask=torch.ones(2, 1, 5, 5).long())
    with pytest.raises(BadInput, match=r"mask \(2, 5\): expected None with a cache, whose `padding`"):
        net(x, net.new_cache(5), torch.ones(2, 5).bool())
    with pytest.raises(BadInput, match="cache a Cache of window 3: expected the layer's window, 2"):
        net(x, Cache(9, window=3))
    with pytest.raises(BadInput, match="causal False: expected True: only causal attention has a cache"):
        attention("grouped", causal=False).new_cache(3)
    with pytest.raises(BadInput, match="mask with nested tensors: expected texts of one length"):
        attention("window")(jagged([x[0]]), mask=torch.ones(1, 5).bool())
