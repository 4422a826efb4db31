"""Attention is what its formula says, on every kernel that runs here, in every form; what can't run says why."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from apprentice import keyed
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness.runs.quiet import quiet
from harness.studies import operations
from lit_modules.nets import Cache, SelfAttention
from lit_modules.nets.attention.form import Backend
from lit_modules.nets.attention.kernels import use_kernel
from tests.attention import assert_same, formula, gradients, jagged, noise

HERE: list[Backend] = ["auto", "math", "flash"]  # on a CPU
D, HEADS = 12, 3
LENGTHS = (4, 1, 7)
# torch's math kernel says so of jagged texts, once a process
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


def attention(causal: bool = False, backend: Backend = "auto", bias: bool = True) -> SelfAttention:
    return with_seed(0, lambda: SelfAttention(D, HEADS, causal, bias=bias, backend=backend).double())


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_formula(backend: Backend, causal: bool, bias: bool) -> None:
    net, x = attention(causal, backend, bias), noise(2, 7, D).requires_grad_()
    ours, plain = net(x), torch.stack([formula(net, text, {"causal": causal}) for text in x])
    assert_same([ours, *gradients(net, x, ours)], [plain, *gradients(net, x, plain)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", HERE)
def test_in_less_precision_it_is_the_formula_up_to_rounding(backend: Backend, dtype: torch.dtype) -> None:
    net, x = attention(True, backend).to(dtype), noise(1, 7, D).to(dtype)
    plain = formula(attention(True).to(dtype).double(), x[0].double(), {})
    error = (net(x)[0].double() - plain).abs().max() / plain.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", HERE)
def test_the_kernel_that_runs_is_the_one_that_was_chosen(backend: Backend) -> None:
    with profiler.profile(use_kineto=False) as told:
        attention(True, backend)(noise(2, 7, D))
    ran = {event.key for event in told.key_averages()}
    flash = any("flash_attention" in name for name in ran)
    assert flash == (backend != "math")
    assert any("attention_math" in name for name in ran) == (backend == "math")


@pytest.mark.parametrize("backend", HERE)
def test_a_later_token_changes_no_earlier_output(backend: Backend) -> None:
    x = noise(2, 7, D)
    other = x.clone()
    other[:, 4] = -3
    causal, seeing = attention(True, backend), attention(False, backend)
    assert torch.equal(causal(x)[:, :4], causal(other)[:, :4])
    assert (causal(x)[:, 4:] != causal(other)[:, 4:]).all()
    assert (seeing(x) != seeing(other)).all()


def test_an_empty_batch_passes() -> None:
    net, x = attention(True), noise(0, 7, D).requires_grad_()
    assert net(x).shape == (0, 7, D)
    assert all((each == 0).all() for each in gradients(net, x, net(x)))


# Jagged


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_jagged_texts_equal_padded_and_masked_ones(backend: Backend) -> None:
    net, values = attention(False, backend), noise(sum(LENGTHS), D).requires_grad_()
    texts = values.split(LENGTHS)
    ours = net(jagged(list(texts))).values()  # (sum of lengths, D)

    padded = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)  # (B, T, D)
    there = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in net.qkv(padded).chunk(3, -1))
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])
    masked = net.out(heads.transpose(1, 2).flatten(-2))[there]
    alone = torch.cat([formula(net, text, {"causal": False}) for text in values.split(LENGTHS)])
    found, *others = ([y, *gradients(net, values, y)] for y in (ours, masked, alone))
    for other in others:
        assert_same(found, other)


# A cache


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("steps", [[1] * 7, [7], [4, 1, 2], [3, 3, 1]])
@torch.no_grad()
def test_cached_equals_recomputed(backend: Backend, steps: list[int]) -> None:
    net, x, cache = attention(True, backend), noise(2, 7, D), Cache(9)
    parts = []
    for part in x.split(steps, 1):
        parts.append(net(part, cache))
        assert cache.length == sum(p.shape[1] for p in parts)
    assert_same([torch.cat(parts, 1)], [net(x)])


def test_a_cache_refuses_what_it_cannot_serve() -> None:
    net, x = attention(True), noise(1, 3, D)
    with pytest.raises(ValueError, match=r"no_grad"):
        net(x, Cache(3))
    with torch.no_grad():
        cache = Cache(5)
        net(x, cache)
        with pytest.raises(ValueError, match=r"max_length 5: expected at least 6"):
            net(x, cache)
        with pytest.raises(ValueError, match="causal"):
            attention(False)(x, Cache(3))
        with pytest.raises(ValueError, match="texts of one length"):
            net(jagged([x[0]]), Cache(3))
        cache = Cache(5)
        net(noise(2, 3, D), cache)
        for texts in (1, 3):
            with pytest.raises(ValueError, match=f"^{texts} texts: expected the 2 whose tokens are cached$"):
                net(noise(texts, 1, D), cache)
        assert cache.length == 3


# Compiled


def compiled_equals_eager(net: SelfAttention) -> None:
    torch.compiler.reset()
    x = noise(2, 7, net.embed_dim).to(net.out.weight.dtype).requires_grad_()
    compiled, eager = torch.compile(net, fullgraph=True, backend="aot_eager")(x), net(x)
    assert_same([compiled, *gradients(net, x, compiled)], [eager, *gradients(net, x, eager)])


@pytest.mark.parametrize(("backend", "causal"), [("auto", True), ("math", False), ("flash", True)])
def test_traced_it_equals_eager(backend: Backend, causal: bool) -> None:
    compiled_equals_eager(attention(causal, backend))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler, as it looks at the error
def test_traced_it_refuses_what_a_kernel_cannot_serve() -> None:
    torch.compiler.reset()
    with pytest.raises((BadInput, RuntimeError), match="No viable backend"):  # the compiler's, or ours
        torch.compile(attention(True, "efficient"), backend="aot_eager")(noise(2, 7, D))


# What is refused

REFUSED = {
    "efficient on a CPU": ("efficient", 0.0, False, "No viable backend"),
    "cudnn on a CPU": ("cudnn", 0.0, False, "No viable backend"),
    "dropout in flash": ("flash", 0.1, False, "do not support non-zero dropout"),
    "jagged texts in flash": ("flash", 0.0, True, "Flash attention requires"),
    "jagged texts in cudnn": ("cudnn", 0.0, True, "torch says: .*(CUDA|cuDNN|viable)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_kernel_cannot_serve_is_refused_with_torchs_reason(kind: str) -> None:
    backend, dropout, nested, reason = REFUSED[kind]
    net = SelfAttention(D, HEADS, not nested, dropout, backend=backend).double()
    x = jagged([noise(4, D), noise(3, D)]) if nested else noise(2, 4, D)
    for _ in range(2):  # torch does not say it once only
        with pytest.raises(BadInput, match=reason) as error:
            net(x)
        assert str(error.value).startswith(f"backend {backend}: expected a kernel that serves attention of float64")
        assert "Triggered" not in str(error.value)
        assert "\n" not in str(error.value)


def test_other_errors_pass() -> None:
    x = noise(1, HEADS, 4, 4)
    call = x, x[..., :2], x
    with pytest.raises(RuntimeError, match="size"), use_kernel("math", *call):
        F.scaled_dot_product_attention(*call)


@pytest.mark.parametrize("backend", HERE)
def test_a_call_that_is_served_leaves_warnings_alone(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(warnings, "catch_warnings")
        assert attention(True, backend)(noise(2, 7, D)).shape == (2, 7, D)


def test_an_experiment_tells_a_refusal_once(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet(), pytest.raises(BadInput, match="non-zero dropout"):
        SelfAttention(D, HEADS, dropout=0.1, backend="flash")(noise(2, 7, D).float())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("known", [True, False])
def test_its_operations_are_counted(backend: Backend, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:  # by the counter of torch 2.11
        for operator in operations.FORMULAS:
            monkeypatch.delitem(flop_registry, operator, raising=False)
    net, x = attention(True, backend), noise(2, 7, D).requires_grad_()
    products = 2 * (2 * 2 * 7**2 * D)  # q kᵀ, and weights times v, for two texts; no kernel's mask is counted
    projections = 2 * 2 * 7 * D * (3 * D + D)
    backward = {"math": 2, "flash": 2.5}[backend]  # flash computes q kᵀ once more
    assert operations.flops(lambda: net(x).sum()) == (1 + backward) * products + 3 * projections


def test_dropout_is_of_training_alone() -> None:
    net, x = SelfAttention(D, HEADS, True, dropout=0.5).double(), noise(2, 7, D)
    dense = SelfAttention(D, HEADS, True).double()
    dense.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(x), dense(x))
    assert (net.train()(x) != dense(x)).any()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0)])
def test_dropout_is_that_of_the_rows_of_the_global_batch(window: int | None, softcap: float | None) -> None:
    """Of two rows each has the zeros that it has among four; values are the formula's, by the keyed bits."""
    net = SelfAttention(D, HEADS, True, 0.5, window=window, softcap=softcap, layer=5).double()
    x, rows = noise(4, 7, D), torch.arange(4)
    with keyed.noise(1, 2, rows):
        whole = net(x)
    with keyed.noise(1, 2, rows[2:]):
        torch.testing.assert_close(net(x[2:]), whole[2:], rtol=0, atol=1e-12)
    kept = keyed.bits(keyed.fold_in(1, 2, 5), rows, HEADS * 7 * 7).view(4, HEADS, 7, 7) >= 2**31
    weights, value = net.weights(x) * kept / 0.5, net.qkv(x).chunk(3, -1)[2].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    torch.testing.assert_close(whole, net.out((weights @ value).transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)
    assert keyed.find_unkeyed_layers(net) == []
    assert keyed.find_unkeyed_layers(SelfAttention(D, HEADS, True, 0.5, backend="flash")) == [""]


def test_the_page_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "attention.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(example, "docs/attention.md", "exec"), {})
    size, refusal = capsys.readouterr().out.splitlines()
    assert size == "torch.Size([10, 64])"
    assert refusal.startswith(page.partition("prints `")[2].partition("\nfor scaled")[0])


def test_strided_nested_tensors_are_refused() -> None:
    texts = torch.nested.nested_tensor([noise(4, D), noise(3, D)], layout=torch.strided)
    with pytest.raises(ValueError, match=re.escape("nested tensors: expected torch.nested.nested_tensor(")):
        SelfAttention(D, 2)(texts)
