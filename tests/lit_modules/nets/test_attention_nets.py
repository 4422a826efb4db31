"""GPT and ViT with each option: cached = whole, packed = alone, compiled = eager, alike everywhere, or refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import Batch
from apprentice.keyed import with_seed
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import GPT, Pruned, ViT, pipeline_stages
from lit_modules.nets.generation import check_writer
from lit_modules.nets.layers import check_keeps_apart
from lit_modules.training.expert_balance import balance_loss, balanced_mixtures, observe_routers
from strategies.tensor_parallel import check as check_parallel
from tests.commands import bad_input
from tests.grids import mostly_slow

MOE: dict[str, Any] = {"mlp": "moe", "hidden": 8, "experts": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2, "head_dim": 6},
    "llama": {"num_kv_heads": 1, "position": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False},
    "alibi": {"position": "alibi", "gate": True},
    "none": {"position": None, "mlp": "gelu_tanh", "scale": 0.3},
    "window": {"window": 4, "sinks": 2, "full_every": 2, "position": "rotary"},
    "gemma": {"norm": "rms", "norm_place": "sandwich", "unit_offset": True, "mlp": "geglu", "softcap": 2.0,
              "final_softcap": 3.0, "scale_embedding": True, "qk_norm": True},
    "gemma 3": {"position": "rotary", "norm": "rms", "unit_offset": True, "qk_norm": True, "window": 4, "full_every": 2,
                "local_rope_base": 20.0},
    "olmo": {"position": "rotary", "norm": "rms", "norm_place": "after", "qk_norm": "width", "num_kv_heads": 2,
             "layer_scale": 0.5},
    "post": {"norm_place": "post"},
    "moe": MOE | {"renormalise": False},
    "linear": {"mixer": "linear"},
    "gated": {"mixer": "gated", "conv": 3},
    "windowed": {"mixer": "windowed", "window": 3, "num_kv_heads": 2, "position": "rotary", "feature_map": "taylor"},
    "delta": {"mixer": "delta", "position": None},
    "latent": {"mixer": "latent", "position": "rotary"},
    "differential": {"mixer": "differential", "num_kv_heads": 2},
    "hybrid": {"mixer": "delta", "softmax_every": 2, "position": "rotary", "window": 4},
}  # fmt: skip


COMPILED = [case for case in OPTIONS if case not in {"grouped", "none", "post", "hybrid"}]  # other parts of others


def make(case: str, **options: Any) -> GPT:
    """A small GPT in float64, with weights so large that each part of it matters."""
    net = with_seed(0, lambda: GPT(11, 16, 3, 4, 16, **{**OPTIONS[case], **options})).double()
    generator = torch.Generator().manual_seed(1)
    for p in net.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3, generator=generator)
    return net


def texts(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", OPTIONS)
def test_cached_is_whole_and_packed_is_alone(case: str) -> None:
    net, tokens = make(case), texts()
    whole = net(tokens)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    after = net(changed)
    torch.testing.assert_close(after[:, :7], whole[:, :7], rtol=0, atol=1e-12)
    assert (after[:, 7:] - whole[:, 7:]).abs().max() > 1e-3
    with torch.no_grad():
        decoder = net.eval().decoder(12, None)
        steps = [decoder(tokens[:, :5]), *(decoder(tokens[:, i : i + 1]) for i in range(5, 12))]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 4:], rtol=0, atol=1e-10)
    starts = torch.tensor([[0] * 5 + [5] * 7]).expand(2, -1)
    torch.testing.assert_close(net(tokens, starts)[:, 5:], net(tokens[:, 5:]), rtol=0, atol=1e-10)
    check_keeps_apart(net, "net")
    check_writer(net)  # of padded texts
    kept = [net.cache_bytes(tokens, 4) for tokens in (8, 1000)]
    grows = OPTIONS[case].get("mixer") not in {"linear", "gated", "delta", "windowed"}
    assert (kept[1] > kept[0]) == grows or case == "hybrid"
    again = GPT(**net.init_args).double()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(tokens), whole)


def test_a_cache_is_as_large_as_what_it_keeps() -> None:
    assert make("grouped").cache_bytes(100, 2) == 3 * 2 * 2 * 6 * 100 * 2
    assert make("window").cache_bytes(100, 4) == 2 * 4 * 4 * 4 * (6 + 100 + 6)
    assert make("linear").cache_bytes(100, 4) == make("linear").cache_bytes(1, 4) == 3 * 4 * 4 * 5 * 4


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("case", mostly_slow(COMPILED, "llama"))
def test_it_compiles_without_a_break(case: str) -> None:
    torch._dynamo.reset()
    net, tokens = make(case), texts()
    compiled = torch.compile(copy.deepcopy(net), fullgraph=True, dynamic=False, backend="aot_eager")
    losses = [module(tokens).square().mean() for module in (net, compiled)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    for p, q in zip(net.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", OPTIONS)
def test_stages_of_a_pipeline_are_the_net(case: str) -> None:
    net, tokens = make(case, tie_weights=False, balance=0.0), texts()
    x = tokens
    for stage in pipeline_stages(net):
        x = stage(x)
    assert torch.equal(x, net(tokens))


def test_blocks_are_left_out_where_others_do_not_change() -> None:
    net = make("llama")
    pruned = Pruned(layers=[0, 2])
    smaller = pruned.make(net, pruned.first(net))
    assert len(smaller.blocks) == 2
    assert torch.equal(smaller.blocks[1].mlp.gate.weight, net.blocks[2].mlp.gate.weight)
    pruned = Pruned(layers=2)
    tokens = texts()
    hybrid = make("hybrid")
    assert "a list of blocks" in bad_input(lambda: pruned.choose(hybrid, tokens, tokens))
    pruned = Pruned(layers=[1, 2])
    assert bad_input(lambda: pruned.make(hybrid, pruned.first(hybrid))).startswith("layers [1, 2]: expected ")
    for options in (
        {"window": 99, "full_every": 2, "local_rope_base": 20.0},
        {"nope_every": 2},
    ):  # windows of any width
        local = make("llama", **options)
        assert bad_input(lambda local=local: pruned.make(local, pruned.first(local))).startswith(
            "layers [1, 2]: expected "
        )


# ViT

VISION: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 1, "qk_norm": True},
    "rotary": {"position": "rotary", "norm": "rms", "mlp": "swiglu", "gate": True},
    "none": {"position": None, "norm_place": "sandwich", "softcap": 2.0},
    "alibi": {"position": "alibi", "norm_place": "post"},
    "registers": {"registers": 3, "distillation_token": True, "layer_scale": 0.1, "qk_norm": "width"},
    "moe": MOE | {"balance": 0.0},
}


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("case", mostly_slow(list(VISION), "rotary"))
def test_a_vit_of_each_kind_compiles_and_is_its_stages(case: str) -> None:
    torch._dynamo.reset()
    net = with_seed(0, lambda: ViT(4, 16, 2, 2, input_shape=(1, 8, 8), num_classes=5, **VISION[case])).double()
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    x = images
    for stage in pipeline_stages(net):
        x = stage(x)
    assert torch.equal(x, net(images))
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(images), net(images), rtol=0, atol=1e-10)
    again = ViT(**net.init_args).double()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(images), net(images))


# Experts


def _balance(net: GPT, tokens: Tensor, labels: Tensor, rows: Tensor, count: int) -> Tensor:
    mixtures = balanced_mixtures(net)
    with observe_routers(mixtures) as outputs:
        net(tokens)
    return balance_loss(mixtures, outputs, Batch(tokens, labels, rows, rows, count, 1, 0))


def test_the_loss_of_loads_is_the_papers_over_tokens_that_count() -> None:
    net, tokens = make("moe", balance=0.5), texts(4, 6)
    labels = tokens.clone()
    labels[0, 3:] = -100
    seen: list[Tensor] = []
    hooks = [block.mlp.router.register_forward_hook(lambda *_: seen.append(_[-1])) for block in net.blocks]
    ours = _balance(net, tokens, labels, torch.arange(4), 4)
    [hook.remove() for hook in hooks]
    expected = torch.zeros((), dtype=torch.float64)
    for logits in seen:
        p = logits.softmax(-1)[labels >= 0]  # (N, E)
        f = torch.stack([(p.topk(2).indices == e).any(1).double().mean() for e in range(4)])
        expected = expected + 0.5 * 4 * (f * p.mean(0)).sum()
    torch.testing.assert_close(ours, expected.detach().expand(4), rtol=0, atol=1e-12)
    weights = [block.mlp.router.weight for block in net.blocks]
    mine, theirs = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in (expected, ours.mean()))
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


# What can't be combined


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "linear", "window": 4}, "window 4: expected its default with mixer=linear: it is of softmax"),
        ({"mixer": "linear", "num_kv_heads": 1}, "num_kv_heads 1: expected its default with mixer=linear"),
        ({"mixer": "delta", "position": "rotary"}, "position rotary: expected learned or null with mixer=delta"),
        ({"mixer": "delta", "attention_dropout": 0.1}, "attention_dropout 0.1: expected its default"),
        ({"mixer": "latent", "num_kv_heads": 2}, "num_kv_heads 2: expected its default with mixer=latent"),
        ({"mixer": "differential", "position": "alibi"}, "position alibi: expected learned, rotary or null with mixer"),
        (
            {"mixer": "windowed", "softmax_every": 2, "window": 4, "sinks": 2},
            "sinks 2: expected its default with mixer",
        ),
        ({"mixer": "windowed", "softcap": 2.0}, "softcap 2.0: expected its default with mixer=windowed"),
        ({"mixer": "windowed", "position": "alibi"}, "position alibi: expected learned, rotary or null with mixer"),
        ({"conv": 4}, "conv 4: expected null, or mixer=linear or gated or delta"),
        ({"mixer": "delta", "feature_map": "elu"}, "feature_map elu: expected null, or mixer=linear or windowed"),
        ({"mixer": "x"}, "mixer x: expected one of softmax, latent, differential, "),
        ({"softmax_every": 2}, "softmax_every 2: expected at least 1, beside a mixer such as linear"),
        ({"full_every": 2}, "full_every 2: expected at least 1, beside a window"),
        ({"rope_base": 2.0}, "rope_base 2.0: expected its default, but for position=rotary"),
        ({"position": "x"}, "position x: expected learned, rotary, alibi or null"),
        ({"position": "rotary", "rope_scaling": {"rope_type": "x"}}, "rope_scaling x: expected rope_type"),
        ({"num_kv_heads": 3}, "num_kv_heads 3: expected a divisor of num_heads, 4"),
        ({"local_rope_base": 2.0, "position": "rotary"}, "local_rope_base 2.0: expected more than 1, beside a window"),
        ({"local_rope_base": 2.0, "window": 4}, "local_rope_base 2.0: expected its default, but for position=rotary"),
        ({"layer_scale": 0.0}, "layer_scale 0.0: expected a number above 0, or null"),
        ({"qk_norm": "x"}, "qk_norm x: expected true, false or width"),
        ({"sinks": 2}, "sinks 2: expected 0 without a window"),
        ({"final_softcap": 0.0}, "final_softcap 0.0: expected above 0, or null"),
        ({"unit_offset": True}, "unit_offset True: expected false with norm=layer"),
        ({"mlp": "moe", "balance": -1.0}, "balance -1.0: expected at least 0"),
        ({"mlp": "moe", "router_noise": 1.0}, "router_noise 1.0: expected at least 0, less than 1"),
        ({"hidden": 0}, "hidden 0: expected at least 1"),
    ],
    ids=str,
)
def test_what_can_not_be_combined_is_refused(options: dict[str, Any], message: str) -> None:
    assert bad_input(lambda: GPT(11, 16, 3, 4, 16, **options)).startswith(message)


def test_what_can_not_be_used_is_refused() -> None:
    net = make("moe", tie_weights=False)
    assert bad_input(pipeline_stages, net).startswith("balance 0.01: expected 0 in a pipeline")
    assert bad_input(lambda: LitLanguageModel(net, compiled=True)).startswith("compiled True: expected false, or balan")
    lit = LitLanguageModel(make("llama"))
    assert bad_input(check_parallel, lit, {"tensor": 2}, 2).startswith("mesh {'tensor': 2}: expected a size of tensor")
