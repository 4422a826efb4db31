"""Attention at its limits: sums that round to 0, texts of no tokens, caches, mixers of a user's own, any batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from harness.studies.choices import check_weights_type
from harness.studies.text.costs import cache_bytes, check_decoding, decoding_ms
from lit_modules.nets import GPT, ViT
from lit_modules.nets.attention import linear
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.convolution import ShortConvolution
from lit_modules.nets.attention.delta import DeltaAttention
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.gated import GatedLinearAttention
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.linear import LinearAttention
from lit_modules.nets.attention.positions import Rotary
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.attention.windowed import WindowedLinearAttention
from lit_modules.nets.generation import Sampling, generate
from lit_modules.nets.layers import check_keeps_apart
from lit_modules.nets.mlps import MixtureOfExperts
from lit_modules.nets.specs import rebuild, to_plain
from tests.commands import bad_input
from tests.language import gpt

D, H = 16, 4
FORMS: list[Callable[..., tuple[Tensor, Tensor]]] = [linear.parallel, linear.recurrent, linear.chunked]


def linear_part() -> nn.Module:
    mixer = WindowedLinearAttention(D, H, window=4, feature_map="elu")
    mixer.part = "linear"
    return mixer


RECURRENT = [LinearAttention, GatedLinearAttention, DeltaAttention, WindowedLinearAttention]
LINEAR: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: LinearAttention(D, H, name) for name in linear.MAPS},
    **{f"{name}, no order": lambda name=name: LinearAttention(D, H, name, causal=False) for name in linear.MAPS},
    **{f"{name}, no window": lambda name=name: WindowedLinearAttention(D, H, 0, name) for name in linear.MAPS},
    "taylor beyond a window": lambda: WindowedLinearAttention(D, H, 4, "taylor"),
    "linear part": linear_part,
}


@pytest.mark.parametrize("far", [-18.0, -40.0])
@pytest.mark.parametrize("form", FORMS)
def test_a_token_that_reads_itself_alone_gets_its_value(form: Callable[..., Any], far: float) -> None:
    """elu(x) + 1 is 0 there in float32; the gradients of one token's output are 0 but that of its value."""
    q = torch.full((1, 1, 1, 2), far, requires_grad=True)
    k, v = (torch.ones(1, 1, 1, 2, requires_grad=True) for _ in range(2))
    phi = linear.Elu(1, 2)
    output, _ = form(phi(q), phi(k), v)
    torch.testing.assert_close(output, v, rtol=1e-2 if far < -30 else 1e-5, atol=0)
    for x, expected in zip(torch.autograd.grad(output.sum(), (q, k, v)), (0.0, 0.0, 1.0), strict=True):
        torch.testing.assert_close(x, torch.full_like(x, expected), rtol=0, atol=1e-2 if far < -30 else 1e-5)


def test_elu_is_the_published_map() -> None:
    x = torch.linspace(-9, 9, 37, dtype=torch.float64, requires_grad=True)
    ours, theirs = linear.Elu(1, 1)(x), nn.functional.elu(x) + 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs))
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-15)  # at 0, too


@pytest.mark.parametrize("name", linear.MAPS)
@pytest.mark.parametrize("size", [1.0, 8.0])
def test_three_forms_and_their_gradients_agree(name: str, size: float) -> None:
    """Of features as the mixers make them, with sums down to the least that float64 tells from 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 11, 4, generator=generator, dtype=torch.float64).mul(size).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    query_map, key_map = (linear.MAPS[name](3, 4).double() for _ in range(2))
    found = []
    for form in FORMS:
        options = {"chunk": 4} if form is linear.chunked else {}
        output, _ = form(query_map(q), key_map(k), v, least=query_map.least, **options)
        found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LINEAR)
def test_large_inputs_have_finite_outputs_and_gradients(name: str) -> None:
    for seed, size in ((0, 30.0), (1, 100.0), (2, 300.0)):
        mixer = with_seed(seed, LINEAR[name])
        x = (size * torch.randn(4, 40, D, generator=torch.Generator().manual_seed(seed))).requires_grad_()
        output = mixer(x)
        gradients = torch.autograd.grad(output.sum(), [x, *mixer.parameters()], allow_unused=True)
        assert all(bool(g.isfinite().all()) for g in (output, *gradients) if g is not None)
        if name.startswith("elu"):  # means of values
            assert output.abs().max() <= 4 * mixer.qkv(x).abs().max()  # type: ignore[operator]


@pytest.mark.parametrize("make", [SelfAttention, LatentAttention, *RECURRENT])
def test_texts_of_no_tokens(make: Callable[..., nn.Module]) -> None:
    mixer: Any = make(D, H, **({"causal": True} if make in {SelfAttention, LatentAttention} else {}))
    nothing = torch.zeros(3, 0, D)
    assert mixer(nothing).shape == (3, 0, D)
    if make not in {SelfAttention, LatentAttention}:
        assert mixer(nothing, mask=torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 0, D)
    with torch.no_grad():  # a cache stays as it is
        x, cache = torch.randn(3, 5, D), mixer.new_cache(9)
        parts = [mixer(part, cache) for part in (x[:, :2], nothing, x[:, 2:])]
        torch.testing.assert_close(torch.cat(parts, 1), mixer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [SelfAttention, LatentAttention, DifferentialAttention])
def test_a_cache_of_another_window_is_refused(make: Callable[..., nn.Module]) -> None:
    mixer, x = make(D, H, causal=True), torch.zeros(1, 2, D)
    with torch.no_grad():
        assert bad_input(mixer, x, Cache(8, window=3)) == "cache a Cache of window 3: expected the layer's window, None"
        state = LinearAttention(D, H).new_cache(8)
        assert bad_input(mixer, x, state) == f"cache State: expected what new_cache() of {make.__name__} makes"


def test_any_batch_is_exported() -> None:
    """Of what once fixed the number of rows; a `len` of a tensor does."""
    layers: dict[nn.Module, tuple[int, ...]] = {
        MixtureOfExperts(8, 4, 3, balance=0.0).eval(): (5, 8),
        DeltaAttention(8, 2, conv=2).eval(): (5, 8),
        SelfAttention(8, 2, causal=True, num_kv_heads=1).eval(): (1, 8),
    }
    for layer, shape in layers.items():
        rows = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(layer, (torch.randn(2, *shape),), dynamic_shapes=rows).module()
        x = torch.randn(3, *shape)
        torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [GatedLinearAttention, DeltaAttention])  # whose loops are all there are
def test_two_graphs_serve_any_number_of_chunks(make: Callable[..., nn.Module]) -> None:
    torch.compiler.reset()
    graphs: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    mixer = with_seed(0, lambda: make(8, 2, chunk=2))
    compiled = torch.compile(mixer, fullgraph=True, backend=backend)
    for count in range(1, 12):
        x = torch.randn(2, 2 * count + 1, 8, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(compiled(x), mixer(x), rtol=1e-5, atol=1e-6)
    assert len(graphs) <= 2
    torch.compiler.reset()


class Running(nn.Module):
    """A user's mixer: the mean of a token and all before it. It has no cache."""

    def __init__(self, embed_dim: int, num_heads: int = 1) -> None:
        super().__init__()
        self.embed_dim, self.out = embed_dim, nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, cache: object = None, mask: Tensor | None = None) -> Tensor:
        mean: Tensor = self.out(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        return mean


class Forgetful(Running):
    """One whose cache holds nothing."""

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> Any:
        return LinearAttention(8, 1).new_cache(max_length, padding)


class Broken(Running):
    """One whose cache fails."""

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> Any:
        raise RuntimeError("no memory")


class Own(GPT):
    """A GPT of such mixers."""

    def __init__(self, vocab_size: int = 11, block_size: int = 16, kind: str = "Running") -> None:
        mixer = {"Running": Running, "Forgetful": Forgetful, "Broken": Broken}[kind]
        super().__init__(vocab_size, block_size, 2, 2, 8, mixer=mixer)


def test_mixers_without_a_cache_write_and_have_no_figures_of_it() -> None:
    net = with_seed(0, Own)
    check_decoding(net, "net")
    prompts = torch.tensor([[1, 2, 3], [4, 5, 0]])
    greedy: dict[str, Any] = {"sampling": Sampling(0.0)}
    written = generate(net, prompts, torch.tensor([3, 2]), 4, **greedy)
    alone = generate(net, prompts[1:, :2], torch.tensor([2]), 4, cached=False, **greedy)
    assert torch.equal(written.tokens[1:], alone.tokens)
    assert torch.equal(net.generate(prompts, 4, temperature=0)[:1, 3:], written.tokens[:1])
    assert net.cache_bytes(9, 4) is cache_bytes(net, 9) is decoding_ms(net, 9) is None


@pytest.mark.parametrize("make", [Running, lambda num_heads, embed_dim: Running(embed_dim, num_heads)])
def test_an_own_mixer_is_given_widths_and_stands_beside_softmax_attention(make: Any) -> None:
    net = with_seed(0, lambda: GPT(11, 16, 2, 2, 8, mixer=make, softmax_layers=[1]))
    assert [type(block.attention).__name__ for block in net.blocks] == ["Running", "SelfAttention"]
    assert net(TOKENS).shape == (2, 9, 11)
    assert ("mixer" in net.init_args) == isinstance(make, type)


def test_a_net_with_an_own_mixer_is_rebuilt_from_its_file(tmp_path: Path) -> None:
    net = GPT(11, 16, 2, 2, 8, mixer=Running)
    save_net(net, spec("lit_modules.nets.gpt.GPT", {**net.init_args, "mixer": Running}), tmp_path)
    again = load_net(tmp_path)
    assert torch.equal(again(TOKENS), net.eval()(TOKENS))
    assert isinstance(rebuild(to_plain(net)).blocks[0].attention, Running)


def test_an_own_mixer_takes_no_options_of_attention() -> None:
    assert bad_input(lambda: GPT(11, 16, 2, 2, 8, mixer=Running, window=3)) == (
        "window 3: expected its default with mixer=Running: it is of softmax attention"
    )
    assert bad_input(lambda: GPT(11, 16, 2, 2, 8, mixer=Running, position="rotary")).startswith("position rotary: ")
    assert bad_input(lambda: ViT(mixer=Running)).startswith("mixer ")


def test_mixers_of_a_wrong_cache_are_refused_before_training() -> None:
    assert bad_input(check_decoding, with_seed(0, lambda: Own(kind="Forgetful")), "net") == (
        "net Own: expected a model whose cached keys and values give the logits of one pass"
    )
    assert bad_input(check_decoding, with_seed(0, lambda: Own(kind="Broken")), "variants.mine") == (
        "variants.mine Own: expected a net that continues texts; it says: no memory"
    )


TOKENS = torch.zeros(2, 9, dtype=torch.int64)
REFUSED: dict[str, Callable[[], object]] = {
    "tokens (2, 9) float32: expected whole numbers (B, T)": lambda: gpt()(TOKENS + 0.9),
    "tokens (9,) int64: expected whole numbers (B, T)": lambda: gpt()(TOKENS[0]),
    "tokens (2, 9) bool: expected whole numbers (B, T)": lambda: gpt().generate(TOKENS > 0),
    "starts (2, 9) bool: expected whole numbers (B, T)": lambda: gpt()(TOKENS, TOKENS == 0),
    "starts (2, 8): expected the shape of tokens, (2, 9)": lambda: gpt()(TOKENS, TOKENS[:, :8]),
    "experts 4: expected its default, but for mlp=moe": lambda: gpt(experts=4),
    "balance -1.0: expected its default, but for mlp=moe": lambda: gpt(balance=-1.0),
    "top_k 1: expected its default, but for mlp=moe": lambda: ViT(top_k=1),
    "norm_eps -1.0: expected 0 or more": lambda: gpt(norm_eps=-1.0),
    "norm_eps nan: expected 0 or more": lambda: ViT(norm="rms", norm_eps=float("nan")),
    "eps -1.0: expected 0 or more": lambda: DifferentialAttention(D, H, eps=-1.0),
    "vocab_size 17.0: expected a whole number": lambda: gpt(17.0),  # type: ignore[arg-type]
    "rope_scaling linear: expected a mapping, as {rope_type: linear, factor: 4}": lambda: gpt(
        position="rotary", rope_scaling="linear"
    ),
    "scaling.beta_fast 1.0: expected more than beta_slow, 32.0": lambda: Rotary(
        scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 1.0,
                 "beta_slow": 32.0}),
    "scaling.high_freq_factor 4.0: expected more than low_freq_factor, 4.0": lambda: Rotary(
        scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 4.0,
                 "high_freq_factor": 4.0}),
    "images (1, 3, 32, 64): expected (B, 3, 32, 32), as input_shape says": lambda: ViT(8, position="rotary")(
        torch.zeros(1, 3, 32, 64)
    ),
    "images (1, 3, 16, 64): expected (B, 3, 32, 32), as input_shape says": lambda: ViT(8)(torch.zeros(1, 3, 16, 64)),
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_can_not_be_is_refused_in_a_line(line: str) -> None:
    assert bad_input(REFUSED[line]) == line


def test_weights_of_16_bits_are_refused_where_they_are_trained() -> None:
    net = ShortConvolution(4).bfloat16()
    expected = "student bfloat16: expected float32 for weights that are trained: 16 bits would round most steps away"
    expected += "; `trainer.precision bf16-mixed` computes in bfloat16 beside them"
    assert bad_input(check_weights_type, net, "student") == expected
    net.init_args = {"dtype": "bfloat16"}  # type: ignore[assignment]
    assert bad_input(check_weights_type, net, "student").startswith("student.dtype bfloat16: expected float32")
    check_weights_type(net.requires_grad_(False), "teacher")
    check_weights_type(ShortConvolution(4).double(), "student")


def test_a_little_of_another_text_is_told_from_none() -> None:
    """A new net whose logits hardly depend on its texts: compared with 1e-3 it would pass."""

    class Leaks(GPT):
        def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
            mixed = 1e-4 * self.embedding.tokens(tokens.long()).cumsum(1)[..., :1]
            return super().forward(tokens, starts) + mixed

    check_keeps_apart(with_seed(0, lambda: GPT(9, 8, 1, 2, 8)), "student")
    with pytest.raises(BadInput, match="mixes the texts of a row"):
        check_keeps_apart(with_seed(0, lambda: Leaks(9, 8, 1, 2, 8)), "student")
