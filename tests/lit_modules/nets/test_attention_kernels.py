"""Bands of a window, FlexAttention and padded jagged texts give what the plain form gives, or say why they can't."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness.studies import operations
from lit_modules.nets import GPT, SelfAttention
from lit_modules.nets.attention import attend as attend_module
from lit_modules.nets.attention import bands, flex
from lit_modules.nets.attention.cross import CrossAttention
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.kernels import use_kernel
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.positions import Alibi
from lit_modules.nets.base import check_fits
from tests.attention import assert_same, formula, gradients, jagged, noise
from tests.commands import bad_input
from tests.grids import mostly_slow
from tests.lit_modules.nets.test_attention import compiled_equals_eager
from tests.lit_modules.nets.test_attention_forms import FORMS, HEADS, D, attention

WINDOWS: dict[str, dict[str, Any]] = {
    "itself": {"window": 1},
    "window": {"window": 3},
    "wide": {"window": 9, "sinks": 1},
    "grouped": {"window": 3, "sinks": 2, "num_kv_heads": 2, "gate": True},
    "alibi": {"window": 4, "position": Alibi(), "num_kv_heads": 3},
    "softcap": {"window": 2, "sinks": 3, "softcap": 0.7, "scale": 0.3},
}
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


# Bands


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "SHORTEST", 4)
    monkeypatch.setattr(bands, "BLOCK", 3)


def windowed(name: str, **options: Any) -> SelfAttention:
    return attention("gate", **{"gate": False} | WINDOWS[name] | options)


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("tokens", [20, 21, 25])
@pytest.mark.parametrize("name", WINDOWS)
def test_bands_are_the_mask(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = windowed(name), noise(2, tokens, D).requires_grad_()
    cut, calls = attend_module.cut_bands, []
    monkeypatch.setattr(attend_module, "cut_bands", lambda *args: calls.append(args) or cut(*args))
    ours = net(x)
    found = [ours, *gradients(net, x, ours)]
    assert len(calls) == 1
    assert_same([torch.stack([formula(net, text, WINDOWS[name]) for text in x])], [ours])
    monkeypatch.setattr(attend_module, "uses_bands", lambda *_: False)
    masked = net(x)
    assert_same(found, [masked, *gradients(net, x, masked)])


@pytest.mark.usefixtures("small_bands")
@torch.no_grad()
def test_a_cache_is_filled_in_bands_and_goes_on() -> None:
    for name in ("grouped", "alibi"):
        net, x = windowed(name), noise(2, 22, D)
        cache = net.new_cache(22)
        assert_same([torch.cat([net(part, cache) for part in x.split([20, 1, 1], 1)], 1)], [net(x)])


@pytest.mark.usefixtures("small_bands")
def test_traced_bands_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "SHORTEST", 7)
    net = windowed("window", window=2, num_kv_heads=2, sinks=1)
    assert bands.uses_bands(attend_module.CausalMask(2, 1), 7)
    compiled_equals_eager(net)


def test_operations_of_a_window_are_linear_in_the_text() -> None:
    net = windowed("window", window=16).float()
    assert not bands.uses_bands(attend_module.CausalMask(16), 511)
    assert not bands.uses_bands(attend_module.CausalMask(300), 599)
    assert not bands.uses_bands(attend_module.CausalMask(16, 1, torch.ones(HEADS)), 600)
    counted = [operations.flops(lambda n=n: net(torch.zeros(1, n, D)).sum()) for n in (1024, 2048)]
    assert counted[1] == pytest.approx(2 * counted[0], rel=0.05)


# Jagged texts


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", mostly_slow(FORMS, "rotary", "sinks", "softcap", "alibi", "all"))
def test_jagged_texts_of_any_form_are_as_alone(name: str, causal: bool) -> None:
    options: dict[str, Any] = {} if causal else {"causal": False, "window": None, "sinks": 0}
    net, values, lengths = attention(name, **options), noise(12, D).requires_grad_(), [4, 1, 7]
    texts = jagged(list(values.split(lengths)))
    ours = (net(texts) + texts).values()  # of the same shape, as in a block
    alone = torch.cat([net(text[None])[0] + text for text in values.split(lengths)])
    assert_same([ours, *gradients(net, values, ours)], [alone, *gradients(net, values, alone)])


def test_a_jagged_text_may_be_empty() -> None:
    for causal in (True, False):
        net, values = attention("softcap", causal=causal), noise(5, D).requires_grad_()
        texts = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 5]))
        ours = net(texts).values()
        alone = torch.cat([net(text[None])[0] for text in values.split([2, 3])])
        assert_same([ours, *gradients(net, values, ours)], [alone, *gradients(net, values, alone)])


# FlexAttention


def other_layers() -> list[tuple[nn.Module, Any]]:
    x = noise(2, 5, D)
    sizes = {"embed_dim": D, "num_heads": HEADS, "backend": "flex"}
    mask = noise(2, 1, 5, 5) > 0
    layers = [LatentAttention(causal=True, **sizes), DifferentialAttention(causal=True, **sizes)]
    return [*((layer, ((x,), (x, None, mask))) for layer in layers), (CrossAttention(**sizes), ((x, noise(2, 7, D)),))]


@pytest.mark.parametrize("name", mostly_slow(FORMS, "alibi, grouped, window"))
@torch.no_grad()
def test_flex_is_the_formula(name: str) -> None:
    net, math, x = attention(name, backend="flex"), attention(name), noise(2, 7, D)
    assert_same([net(x)], [torch.stack([formula(math, text, FORMS[name]) for text in x])])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinks", "softcap", "gemma", "all", "alibi, grouped, window"])
@torch.no_grad()
def test_flex_takes_long_texts_masks_and_caches(name: str) -> None:
    net, math, x, long = attention(name, backend="flex"), attention(name), noise(2, 7, D), noise(1, 131, D)
    assert_same([net(long)], [math(long)])  # of more than one block
    for mask in (torch.tensor([[False] * 2 + [True] * 5, [True] * 7]), noise(2, HEADS, 7, 7)):
        assert_same([net(x, mask=mask)], [math(x, mask=mask)])
    cache = net.new_cache(7)
    assert_same([torch.cat([net(part, cache) for part in x.split([4, 2, 1], 1)], 1)], [math(x)])


@pytest.mark.slow
@torch.no_grad()
def test_flex_serves_layers_of_all_kinds() -> None:
    whole = [attention("alibi", causal=False, backend=backend) for backend in ("flex", "math")]
    assert_same(*([net(noise(2, 7, D))] for net in whole))
    for layer, calls in other_layers():
        layer.double()
        ours = [layer(*inputs) for inputs in calls]
        layer.form.backend = "math"
        assert_same(ours, [layer(*inputs) for inputs in calls])
    assert attention("window", backend="flex")(noise(0, 7, D)).shape == (0, 7, D)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    gpts = [with_seed(0, lambda name=name: GPT(11, 8, 1, 2, 8, backend=name)) for name in ("flex", "math")]
    assert torch.equal(*(gpt.generate(tokens) for gpt in gpts))


@torch.no_grad()
def test_block_masks_are_made_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    whole = flex.create_block_mask
    monkeypatch.setattr(flex, "create_block_mask", lambda *args: made.append(args) or whole(*args))
    monkeypatch.setattr(flex, "_call", lambda query, *_: query)
    flex._kept_blocks.cache_clear()
    for _ in range(2):
        for name in ("rotary", "window", "sinks"):
            attention(name, backend="flex")(noise(1, 6, D))
    assert len(made) == 3
    assert flex._kept_blocks.cache_info().maxsize == flex.KEPT


@pytest.mark.slow
@torch.no_grad()
def test_traced_flex_equals_eager() -> None:
    torch.compiler.reset()
    net, x = attention("all", backend="flex"), noise(2, 7, D)
    assert_same([torch.compile(net, fullgraph=True, backend="aot_eager")(x)], [net(x)])


def test_flex_refuses_what_it_cannot_serve() -> None:
    net, x = attention("window", backend="flex"), noise(2, 5, D)
    training = "backend flex: expected another kernel to train: on a CPU flex has no gradients"
    assert bad_input(net, x) == training
    with torch.no_grad():
        net = SelfAttention(D, HEADS, dropout=0.1, backend="flex").double()
        assert (
            bad_input(net, x) == "backend flex: expected another kernel: flex has no dropout of weights, which is 0.1"
        )
    with pytest.raises(BadInput, match="backend flex: expected one of auto, math, flash"), use_kernel("flex", x):
        pass
    gpt = GPT(11, 8, 1, 2, 8, backend="flex")
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert bad_input(check_fits, gpt, tokens, (8, 11)) == f"net.{training}"
