"""Linear attention is what its formulas say, in three forms alike; texts in a row and padding stay apart."""

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets.attention import delta, gated, linear
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.convolution import ShortConvolution
from lit_modules.nets.attention.delta import DeltaAttention
from lit_modules.nets.attention.gated import GatedLinearAttention
from lit_modules.nets.attention.linear import LinearAttention
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.attention.recurrent import RecurrentMixer
from tests import with_transformers
from tests.attention import assert_same, noise

B, H, D, E = 2, 3, 4, 5
FORMS = {"linear": linear, "gated": gated, "delta": delta}
KINDS = [*FORMS]
MIXERS: dict[str, Callable[..., RecurrentMixer]] = {
    "elu": lambda **o: LinearAttention(12, 3, **o),
    "hedgehog": lambda **o: LinearAttention(12, 3, "hedgehog", **o),
    "taylor": lambda **o: LinearAttention(12, 3, "taylor", conv=3, **o),
    "gated": lambda **o: GatedLinearAttention(12, 3, conv=2, **o),
    "delta": lambda **o: DeltaAttention(12, 3, **o),
    "ungated delta": lambda **o: DeltaAttention(12, 3, gated=False, gate=False, conv=0, **o),
}


def mixer(name: str, **options: Any) -> RecurrentMixer:
    """One whose parameters all differ from what they begin as, in float64."""
    net = with_seed(0, lambda: MIXERS[name](**{"chunk": 4} | options).double())
    for number, p in enumerate(net.parameters()):
        p.data += 0.3 * noise(*p.shape, seed=number)
    return net


def inputs(kind: str, length: int, state: bool) -> list[Tensor]:
    """q, k, v, gates and, if wanted, a state, as leaves."""
    q, k, v = noise(B, H, length, D, seed=2), noise(B, H, length, D, seed=3), noise(B, H, length, E, seed=4)
    gates = {
        "linear": [],
        "gated": [-noise(B, H, length, D, seed=5).exp()],
        "delta": [noise(B, H, length, seed=5).sigmoid(), -noise(B, H, length, seed=6).exp()],
    }[kind]
    if kind == "linear":
        q, k = q.exp(), k.exp()
    if kind == "delta":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    first = noise(B, H, D, E + (kind == "linear"), seed=7).abs()
    return [x.detach().requires_grad_() for x in (q, k, v, *gates, *([first] if state else []))]


def formula(kind: str, starts: Tensor | None, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and last states, one row, head and token after the other, as the papers write them."""
    (q, k, v), gates = leaves[:3], leaves[3 : 3 + {"linear": 0, "gated": 1, "delta": 2}[kind]]
    first = leaves[3 + len(gates)] if len(leaves) > 3 + len(gates) else None
    outputs, states = [], []
    for row in range(B):
        for head in range(H):
            width = E + (kind == "linear")
            s = torch.zeros(D, width).double() if first is None else first[row, head]
            for t in range(q.shape[2]):
                if starts is not None and starts[row, t] == t:
                    s = torch.zeros(D, width).double()
                qt, kt, vt = q[row, head, t], k[row, head, t], v[row, head, t]
                if kind == "linear":
                    s = s + torch.outer(kt, torch.cat([vt, vt.new_ones(1)]))
                    outputs.append(s[:, :E].T @ qt / (s[:, E] @ qt))
                elif kind == "gated":
                    s = torch.diag(gates[0][row, head, t].exp()) @ s + torch.outer(kt, vt)
                    outputs.append(s.T @ qt / math.sqrt(D))
                else:
                    s = gates[1][row, head, t].exp() * s
                    s = s + torch.outer(kt, gates[0][row, head, t] * (vt - s.T @ kt))
                    outputs.append(s.T @ qt / math.sqrt(D))
            states.append(s)
    return torch.stack(outputs).view(B, H, -1, E), torch.stack(states).view(B, H, D, -1)


def gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    total = sum((x * torch.linspace(-1, 2, x.numel()).view_as(x)).sum() for x in results)
    return list(torch.autograd.grad(total, leaves))


def texts(length: int, *lengths: int) -> Tensor:
    """(1, T), where texts of these lengths begin, the last one as long as there is room; a first below 0 continues."""
    places, begin = torch.empty(0, dtype=torch.int64), 0
    for size in (*lengths, length):
        places = torch.cat([places, torch.full((size,), begin)])
        begin += size
    return places[None, :length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("length", [1, 4, 11])
@pytest.mark.parametrize("packed", [False, True])
def test_three_forms_are_the_formula(kind: str, state: bool, length: int, packed: bool) -> None:
    leaves = inputs(kind, length, state)
    starts = torch.cat([texts(length, 2, 1, 5), texts(length, 6) - 1 * (texts(length, 6) == 0)]) if packed else None
    count = {"linear": 3, "gated": 4, "delta": 5}[kind]
    call, first = leaves[:count], leaves[count] if state else None
    expected = formula(kind, starts, leaves)
    wanted = [*expected, *gradients(expected, leaves)]
    module = FORMS[kind]
    forms = [module.parallel, module.recurrent, *(lambda *a, c=c: module.chunked(*a, chunk=c) for c in (1, 3, 4, 64))]
    for form in forms:
        results = form(*call, first, starts)
        assert_same([*results, *gradients(results, leaves)], wanted)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_is_its_formula(name: str) -> None:
    """What stands around the forms, from the module's parameters, written out for one text."""
    net, x = mixer(name), noise(1, 7, 12)
    parts = dict(net.named_parameters())
    mixed = x[0] @ parts["qkv.weight"].T + parts["qkv.bias"]  # (T, 3 D)
    if net.conv is not None:
        width = net.conv.width
        rows = [sum(parts["conv.weight"][:, width - 1 - i] * mixed[t - i] for i in range(min(width, t + 1)))
                for t in range(7)]  # fmt: skip
        mixed = torch.stack(rows)
        mixed = mixed * torch.sigmoid(mixed)
    q, k, v = (part.view(7, 3, 4).transpose(0, 1) for part in mixed.split(12, 1))  # (H, T, d)
    gate = parts.get("finish_heads.gate.weight")
    if isinstance(net, LinearAttention):
        weights = kernel(name, parts, q, k).tril()
        heads = weights @ v / weights.sum(-1, keepdim=True)
    elif isinstance(net, GatedLinearAttention):
        z = x[0] @ parts["decay.0.weight"].T @ parts["decay.1.weight"].T + parts["decay.1.bias"]
        g = (torch.sigmoid(z).log() / 16).view(7, 3, 4).transpose(0, 1)
        heads = alone("gated", q, k, v, g)
    else:
        beta = torch.sigmoid(x[0] @ parts["beta.weight"].T).T
        g = torch.zeros(3, 7).double()
        if "decay.bias" in parts:
            z = x[0] @ parts["decay.project.weight"].T + parts["decay.bias"]
            g = -(parts["decay.log_rate"].exp() * torch.log(1 + z.exp())).T
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        heads = alone("delta", q, k, v, beta, g)
    if (scale := parts.get("finish_heads.norm.weight")) is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    heads = heads.transpose(0, 1).flatten(1)
    if gate is not None:
        z = x[0] @ gate.T
        heads = heads * z * torch.sigmoid(z)
    assert_same([net(x)[0]], [heads @ parts["out.weight"].T + parts["out.bias"]])


def kernel(name: str, parts: dict[str, Tensor], q: Tensor, k: Tensor) -> Tensor:
    """φ(q)·φ(k) of all pairs, (H, T, T)."""
    if name == "taylor":
        s = q @ k.mT / 2  # √4
        return 1 + s + s * s / 2
    if name == "elu":
        q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        return q @ k.mT
    q, k = (torch.einsum("htd,hed->hte", x, parts[f"{n}_map.weight"]) for n, x in (("query", q), ("key", k)))
    q, k = (torch.cat([x.exp(), (-x).exp()], -1) for x in (q, k))
    return (q / q.sum(-1, keepdim=True)) @ (k / k.sum(-1, keepdim=True)).mT


def alone(kind: str, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """The formula's outputs (H, T, d) of one text."""
    heads = []
    for h in range(3):
        s, rows = torch.zeros(4, 4).double(), []
        for t in range(q.shape[1]):
            if kind == "gated":
                s = gates[0][h, t].exp()[:, None] * s + torch.outer(k[h, t], v[h, t])
            else:
                s = gates[1][h, t].exp() * s
                s = s + torch.outer(k[h, t], gates[0][h, t] * (v[h, t] - s.T @ k[h, t]))
            rows.append(s.T @ q[h, t] / 2)
        heads.append(torch.stack(rows))
    return torch.stack(heads)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("steps", [[1] * 7, [7], [3, 1, 1, 2]])
@torch.no_grad()
def test_cached_equals_computed_at_once(name: str, steps: list[int]) -> None:
    net, x = mixer(name), noise(2, 7, 12)
    cache, parts = net.new_cache(7), []
    for part in x.split(steps, 1):
        parts.append(net(part, cache))
        assert cache.length == sum(p.shape[1] for p in parts)
    assert_same([torch.cat(parts, 1)], [net(x)])
    assert cache.memory is not None
    kept = [cache.memory[0], *([] if cache.inputs is None else [cache.inputs[0]])]
    assert sum(t.numel() * t.element_size() for t in kept) == net.cache_bytes(7, 8) == net.cache_bytes(10**6, 8)
    assert net.cache_bytes(7, 2) <= net.cache_bytes(7, 4) < net.cache_bytes(7, 8)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("steps", [[1] * 7, [7], [3, 1, 3]])
@torch.no_grad()
def test_padding_before_a_text_changes_nothing(name: str, steps: list[int]) -> None:
    net, x, padding = mixer(name), noise(3, 7, 12), torch.tensor([0, 2, 5])
    cache = net.new_cache(7, padding)
    cached = torch.cat([net(part, cache) for part in x.split(steps, 1)], 1)
    mask = torch.arange(7) >= padding[:, None]
    for row, count in enumerate(padding.tolist()):
        expected = net(x[row : row + 1, count:])[0]
        assert_same([cached[row, count:], net(x, mask=mask)[row, count:]], [expected, expected])
    assert net(x, mask=mask).isfinite().all()
    after = torch.arange(7) < 7 - padding[:, None]  # behind a text: it is causal
    assert_same([net(x, mask=after)[after]], [net(x)[after]])


@pytest.mark.parametrize("name", MIXERS)
def test_texts_of_a_row_do_not_see_one_another(name: str) -> None:
    net, x = mixer(name), noise(2, 11, 12).requires_grad_()
    starts = torch.cat([texts(11, 2, 1, 5), texts(11, 6)])
    leaves = [x, *net.parameters()]
    apart = torch.stack(
        [
            torch.cat([net(part[None])[0] for part in x[row].split(sizes)])
            for row, sizes in enumerate([(2, 1, 5, 3), (6, 5)])
        ]
    )
    wanted = [apart, *gradients((apart,), leaves)]
    for mask in (starts, mask_texts(starts)):
        packed = net(x, mask=mask)
        assert_same([packed, *gradients((packed,), leaves)], wanted)
    assert_same([net(x, mask=torch.ones(11, 11).bool().tril()[None, None])], [net(x)])


@pytest.mark.parametrize("name", MIXERS)
def test_it_is_causal_and_takes_an_empty_batch(name: str) -> None:
    net, x = mixer(name), noise(2, 7, 12)
    other = x.clone()
    other[:, 4] = -3
    assert torch.equal(net(x)[:, :4], net(other)[:, :4])
    assert (net(x)[:, 4:] != net(other)[:, 4:]).all()
    empty = noise(0, 7, 12).requires_grad_()
    assert net(empty).shape == (0, 7, 12)
    assert all((g == 0).all() for g in torch.autograd.grad(net(empty).sum(), [empty, *net.parameters()]))


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_less_precision_it_is_the_formula_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    net, x = mixer(name).to(dtype), noise(2, 40, 12).to(dtype)
    output, exact = net(x), mixer(name).to(dtype).double()(x.double())
    assert output.dtype == dtype
    assert (output.double() - exact).abs().max() / exact.abs().max() < 30 * torch.finfo(dtype).eps
    net, x = mixer(name).float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        automatic, cache = net(x), net.new_cache(40)
        with torch.no_grad():
            cached = torch.cat([net(part, cache) for part in x.split([39, 1], 1)], 1)
    assert automatic.dtype == torch.bfloat16
    assert cache.memory is not None
    assert cache.memory.dtype == torch.float32
    for found in (automatic, cached):
        assert (found.double() - exact).abs().max() / exact.abs().max() < 0.2
    gradient = torch.autograd.grad(automatic.float().square().sum(), [*net.parameters()])
    assert all(g.isfinite().all() for g in gradient)


@pytest.mark.parametrize("kind", ["gated", "delta"])
def test_states_that_forget_at_once_overflow_nowhere(kind: str) -> None:
    leaves = [x.float().detach() for x in inputs(kind, 96, False)]
    leaves[-1] = leaves[-1] * 1000
    leaves = [x.requires_grad_() for x in leaves]
    results = FORMS[kind].parallel(*leaves)
    assert all(x.isfinite().all() for x in (*results, *gradients(results, leaves)))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_convolution_is_that_of_torch(width: int) -> None:
    ours, x = ShortConvolution(6, width).double(), noise(2, 9, 6).requires_grad_()
    theirs = nn.Conv1d(6, 6, width, groups=6, bias=False, padding=width - 1).double()
    theirs.weight.data = ours.weight.data[:, None]
    expected = F.silu(theirs(x.mT)[..., :9].mT)
    output, _ = ours(x)
    grads = torch.autograd.grad(output.square().sum(), [x, ours.weight])
    others = torch.autograd.grad(expected.square().sum(), [x, theirs.weight])
    assert_same([output, grads[0], grads[1]], [expected, others[0], others[1][:, 0]])
    bound = torch.empty(1000, 1, width)
    nn.init.kaiming_uniform_(bound, math.sqrt(5))  # torch's first weights
    assert bound.abs().max() <= 1 / math.sqrt(width)
    assert ours.weight.abs().max() <= 1 / math.sqrt(width)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["taylor", "gated", "delta"])
def test_it_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    net, x = mixer(name).float(), noise(2, 9, 12).float().requires_grad_()
    starts = torch.cat([texts(9, 2, 1), texts(9, 6)])
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for mask in (None, mask_texts(starts), starts == 0):
        ours, plain = compiled(x, mask=mask), net(x, mask=mask)
        leaves = [x, *net.parameters()]
        assert_same([ours, *gradients((ours,), leaves)], [plain, *gradients((plain,), leaves)], 2e-5)
    torch.compiler.reset()


def _qwen3_next() -> Any:
    """Its module, without flash-linear-attention's kernels, which it would take where that is installed: of GPUs."""
    warnings.simplefilter("ignore")
    sys.modules["fla"] = None  # type: ignore[assignment]
    from transformers.models.qwen3_next import modeling_qwen3_next

    return modeling_qwen3_next


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_gated_deltas_rule_is_that_of_qwen3_next() -> None:
    qwen = _qwen3_next()
    for length in (1, 70):
        q, k, v, beta, g, state = (x.detach() for x in inputs("delta", length, True))
        turned = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
        for theirs in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
            expected, last = theirs(*turned, initial_state=state, output_final_state=True)
            for form in (delta.parallel, delta.chunked, delta.recurrent):
                ours, after = form(q, k, v, beta, g, state)
                assert_same([ours.transpose(1, 2).float(), after.float()], [expected.float(), last.float()], 1e-5)


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_gated_deltas_layer_is_that_of_qwen3_next() -> None:
    """Its rule is computed in float32, whatever the type."""
    qwen = _qwen3_next()
    config = qwen.Qwen3NextConfig(
        hidden_size=12, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=4,
        linear_value_head_dim=4, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs, x = qwen.Qwen3NextGatedDeltaNet(config, 0).float(), noise(2, 70, 12).float()
    ours: Any = mixer("delta", bias=False, chunk=64).float()
    with torch.no_grad():
        qkv, gate = ours.qkv.weight.view(3, 3, 4, 12), ours.finish_heads.gate.weight.view(3, 4, 12)
        theirs.in_proj_qkvz.weight.copy_(torch.cat([*qkv, gate], 1).flatten(0, 1))  # (H, q k v z of d, D)
        rates = torch.stack([ours.beta.weight, ours.decay.project.weight], 1)  # (H, 2, D)
        theirs.in_proj_ba.weight.copy_(rates.flatten(0, 1))
        theirs.conv1d.weight.copy_(ours.conv.weight[:, None])
        theirs.A_log.copy_(ours.decay.log_rate)
        theirs.dt_bias.copy_(ours.decay.bias)
        theirs.norm.weight.copy_(ours.finish_heads.norm.weight)
        theirs.out_proj.weight.copy_(ours.out.weight)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2e-5, atol=1e-5)


def test_bad_input_is_one_line() -> None:
    net, x = mixer("delta"), noise(2, 7, 12)
    ragged = torch.tensor([[True, False, True]]).expand(2, 3)
    band = torch.ones(7, 7).bool().tril().triu(-2)[None, None]
    for match, call in {
        r"num_heads 5: expected a divisor of embed_dim, 12": lambda: LinearAttention(12, 5),
        r"feature_map relu: expected one of elu, hedgehog, taylor": lambda: LinearAttention(12, 3, "relu"),  # type: ignore[arg-type]
        r"chunk 0: expected at least 1": lambda: GatedLinearAttention(12, 3, chunk=0),
        r"conv -1: expected a width of at least 1, or 0": lambda: DeltaAttention(12, 3, conv=-1),
        r"rank 0: expected at least 1": lambda: GatedLinearAttention(12, 3, rank=0),
        r"mask \(7, 7\) bool: expected \(2, 7\) bool or int64 starts": lambda: net(x, mask=band[0, 0]),
        r"mask \(1, 1, 7, 7\): expected one of causal texts": lambda: net(x, mask=band),
        r"mask \(2, 1, 7, 7\) float32: expected": lambda: net(x, mask=torch.zeros(2, 1, 7, 7)),
        r"padding inside a text: expected padding before or after it": lambda: net(x[:, :3], mask=ragged),
        r"mask \(2, 7\): expected None beside a cache": lambda: net(x, net.new_cache(7), x[..., 0] > 0),
        r"cache Cache: expected what new_cache\(\) of DeltaAttention makes": lambda: net(x, Cache(7)),  # type: ignore[arg-type]
        r"a cache holds no gradients: expected a call under torch.no_grad": lambda: net(x, net.new_cache(7)),
    }.items():
        with pytest.raises(BadInput, match=match):
            call()
    cache = net.new_cache(9)
    with torch.no_grad():
        net(x, cache)
        with pytest.raises(BadInput, match="1 texts: expected the 2 whose tokens are cached"):
            net(x[:1], cache)
    with pytest.raises(BadInput, match="nested tensors: expected texts of one length"):
        net(torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged))


@pytest.mark.parametrize("name", ["elu", "hedgehog"])
def test_without_an_order_sums_equal_the_parallel_form_and_weights(name: str) -> None:
    net = mixer(name, causal=False)
    x, present = noise(B, 7, 12), torch.arange(7) < torch.tensor([[7], [4]])
    query, key, value = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in net.qkv(x).chunk(3, -1))
    products = net.query_map(query) @ net.key_map(key).mT * present[:, None, None]
    weights = products / products.sum(-1, keepdim=True)
    expected = net.out((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(net(x, mask=present), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.weights(x, present), weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net(x, mask=present)[1, :4], net(x[1:, :4])[0], rtol=1e-12, atol=1e-12)
    found, wanted = (
        torch.autograd.grad(y.square().sum(), [*net.parameters()]) for y in (net(x, mask=present), expected)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    torch.testing.assert_close(net(x[:, order]), net(x)[:, order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MIXERS)
def test_causal_weights_mix_the_values(name: str) -> None:
    net: Any = mixer(name)
    x, starts = noise(B, 7, 12), torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0] * 7])
    for mask in (None, starts):
        value, weights = net._heads(net.qkv(x), None, mask)[0][2], net.weights(x, mask)
        if isinstance(net, LinearAttention):
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)
        mixed = net.finish((weights @ value).transpose(1, 2), x)
        torch.testing.assert_close(net.out(mixed.flatten(2)), net(x, mask=mask), rtol=1e-12, atol=1e-12)


def test_without_an_order_there_is_no_convolution_cache_or_text() -> None:
    net = LinearAttention(12, 3, causal=False)
    cases: dict[str, Callable[[], object]] = {
        "conv 4: expected 0, but for causal attention": lambda: LinearAttention(12, 3, conv=4, causal=False),
        "causal False: expected True: only causal attention has a cache": lambda: net.new_cache(4),
        "cache Cache: expected None, but for causal attention": lambda: net(torch.zeros(1, 4, 12), Cache(4)),
        r"mask \(1, 4\) int64: expected \(1, 4\) bool, false for padding": lambda: net(
            torch.zeros(1, 4, 12), mask=torch.zeros(1, 4, dtype=torch.int64)
        ),
    }
    for line, make in cases.items():
        with pytest.raises(BadInput, match=f"^{line}"):
            make()
