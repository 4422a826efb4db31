"""The vision transformer is the papers', and gives the same numbers wherever it is computed."""

import re
import shutil
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from apprentice.errors import BadInput
from apprentice.keyed import noise, with_seed
from experiments import kd
from harness.runs.nets import load_net
from harness.runs.session import Session
from lit_modules.distillation import Distillation
from lit_modules.nets import ViT, attention_maps, run
from lit_modules.objectives import DeiTToken, Hint
from tests.commands import results
from tests.grids import mostly_slow
from tests.training import SHAPE, assert_same, classifier, digits, fit, near_ties, net, on, outcome, weights

TINY: dict[str, Any] = {"embed_dim": 16, "num_layers": 2, "num_heads": 2}
tiny = partial(ViT, **TINY)


@pytest.mark.parametrize(("token", "count"), [(False, 5_717_416), (True, 5_910_800)])
def test_deit_tiny_has_the_papers_size(token: bool, count: int) -> None:
    with torch.device("meta"):
        made = ViT(16, 192, 12, 3, distillation_token=token, input_shape=(3, 224, 224), num_classes=1000)
    assert sum(p.numel() for p in made.parameters()) == count


NAMES = {  # ours, as patterns, and torchvision's
    r"^embedding\.patches": "conv_proj",
    r"^embedding\.tokens": "class_token",
    r"^embedding\.positions": "encoder.pos_embedding",
    r"^blocks\.": "encoder.layers.encoder_layer_",
    r"norm(\d)": r"ln_\1",
    r"^norm": "encoder.ln",
    r"^head": "heads.head",
    r"mlp\.2": "mlp.3",
    r"attention\.qkv\.": "self_attention.in_proj_",
    r"attention\.out": "self_attention.out_proj",
}


def theirs(name: str) -> str:
    for ours, other in NAMES.items():
        name = re.sub(ours, other, name)
    return name


def test_it_computes_what_torchvisions_does() -> None:
    ours = with_seed(0, lambda: ViT(4, 16, 2, 2, input_shape=(3, 16, 16), num_classes=7)).double()
    other = VisionTransformer(16, 4, 2, 2, 16, 64, num_classes=7).double()
    generator = torch.Generator().manual_seed(1)
    for p in ours.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    other.load_state_dict({theirs(name): value for name, value in ours.state_dict().items()})
    x = torch.randn(5, 3, 16, 16, generator=generator, dtype=torch.float64)
    logits, expected = ours(x), other(x)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    logits.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[theirs(name)], rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8)])
@pytest.mark.parametrize("token", [False, True])
def test_patches_fit_the_images_and_give_maps(shape: tuple[int, int, int], token: bool) -> None:
    made = tiny(input_shape=shape, num_classes=7, distillation_token=token)
    x = torch.randn(2, *shape)
    found = run(made, x, {"default", "blocks.0"})
    assert found.logits.shape == (2, 7)
    assert made(x[:0]).shape == (0, 7)  # a rank's share of a batch may be empty
    maps, tokens = found.features["default"], found.features["blocks.0"]
    rows, columns = shape[1] // 4, shape[2] // 4
    assert maps.shape == (2, 16, rows, columns)
    assert tokens.shape == (2, rows * columns + 1 + token, 16)
    assert torch.equal(maps[1, :, rows - 1, 1], tokens[1, 1 + token + (rows - 1) * columns + 1])


def test_with_a_distillation_token_logits_are_the_mean_of_two_heads() -> None:
    made = with_seed(0, lambda: tiny(distillation_token=True)).double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    for mode in (True, False):
        found = run(made.train(mode), x, {"head", "head_dist"})
        torch.testing.assert_close(found.logits, (found.features["head"] + found.features["head_dist"]) / 2)
        assert (found.features["head"] - found.features["head_dist"]).abs().max() > 1e-3


@pytest.mark.parametrize("feature_map", [None, "hedgehog", "taylor"])
def test_linear_attention_is_that_of_all_tokens(feature_map: Any) -> None:
    made = with_seed(0, lambda: tiny(mixer="linear", softmax_every=2, feature_map=feature_map)).double()
    assert [type(block.attention).__name__ for block in made.blocks] == ["LinearAttention", "SelfAttention"]
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    tokens, first = made.embedding(x), made.blocks[0]
    mixed = attention_maps(made, x)["blocks.0.attention"] @ heads_values(first, tokens)
    tokens = tokens + first.attention.out(mixed.transpose(1, 2).flatten(2))
    tokens = made.blocks[1](tokens + first.mlp(first.norm2(tokens)))
    torch.testing.assert_close(made(x), made.head(made.norm(tokens[:, 0])), rtol=1e-12, atol=1e-12)
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), made(x), rtol=1e-12, atol=1e-12)


def heads_values(block: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(B, H, T, d)."""
    return block.attention.qkv(block.norm1(tokens)).chunk(3, -1)[2].unflatten(2, (2, -1)).transpose(1, 2)


def test_mixers_of_texts_and_impossible_options_are_refused() -> None:
    cases: dict[str, dict[str, Any]] = {
        "mixer delta: expected softmax or linear: others see earlier tokens alone": {"mixer": "delta"},
        "position rotary: expected learned or null with mixer=linear, which has no": {
            "mixer": "linear", "position": "rotary",
        },
        "softcap 2.0: expected its default with mixer=linear": {"mixer": "linear", "softcap": 2.0},
        "softmax_every 2: expected at least 1, beside a mixer such as linear": {"softmax_every": 2},
        "feature_map elu: expected null, or mixer=linear": {"feature_map": "elu"},
    }  # fmt: skip
    for line, options in cases.items():
        with pytest.raises(BadInput, match=f"^{line}"):
            tiny(**options)


def test_dropout_is_keyed_to_the_rows_of_the_global_batch() -> None:
    made, x = tiny(dropout=0.3).double(), torch.randn(6, 3, 32, 32, dtype=torch.float64)
    with noise(seed=3, step=1, rows=torch.arange(6)):
        whole = made(x)
    with noise(seed=3, step=1, rows=torch.arange(2, 5)):
        torch.testing.assert_close(made(x[2:5]), whole[2:5], rtol=0, atol=1e-12)
    with noise(seed=3, step=2, rows=torch.arange(6)):
        assert (made(x) - whole).abs().max() > 1e-3
    layers = [m.layer for m in made.modules() if hasattr(m, "layer")]
    assert len(set(layers)) == len(layers) == 5 + 2  # and those of attention weights


# The same numbers everywhere


def students() -> Distillation:
    """A teacher and students of this kind, with keyed noise, both kinds of token, and features that are compared."""
    made = {
        "hard": (net(tiny, distillation_token=True, dropout=0.1), DeiTToken()),
        "soft": (net(tiny, distillation_token=True), DeiTToken("soft")),
        "hint": (net(tiny, dropout=0.1), Hint()),
    }
    return Distillation(net(tiny, seed=1), made, input_shape=SHAPE)


@cache
def ended(place: str = "auto 1") -> dict[str, torch.Tensor]:
    """Weights after 12 steps."""
    steps = {"max_epochs": -1, "max_steps": 12, "precision": "64-true"}
    return weights(fit(students(), digits(train_size=112), **steps | on(place)))


# All others: tests/lit_modules/text/test_language_model.py
PLACES = ["ddp 3", "fsdp 2", "tensor_parallel 2", "param_server 3", "pipeline 2"]


@pytest.mark.parametrize("place", mostly_slow(PLACES, "ddp 3"))
def test_float64_agrees_with_one_process(place: str) -> None:
    assert_same(ended(), ended(place), atol=1e-9)


@pytest.mark.slow
def test_exact_bits_are_those_of_one_process() -> None:
    places = ("ddp 1 exact 4", "ddp 3 exact 4", "pipeline 2 exact 4")
    one, *others = (weights(fit(students(), digits(), **on(place))) for place in places)
    for other in others:
        assert_same(one, other)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile wants a compiler")
def test_compiled_it_gives_eager_logits_and_gradients() -> None:
    x, found = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0)), []
    for compiled in (False, True):
        made = net(ViT, **TINY | {"num_layers": 1}, distillation_token=True)
        if compiled:
            made.compile(dynamic=False)
        logits = made(x)
        logits.square().sum().backward()
        found.append({"logits": logits.detach(), **{name: p.grad for name, p in made.named_parameters()}})
    assert_same(found[0], found[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own looking
def test_compiled_it_trains_to_eager_losses(tmp_path: Path) -> None:  # in ranks: a language model
    found = []
    for compiled in (False, True):
        module = classifier(tiny, num_layers=1, dropout=0.1, distillation_token=True)
        if compiled:  # what is traced is the same with any backend; this one needs no compiler
            module.net.compile(dynamic=False, backend="aot_eager")
        data = digits(train_size=108, batch_size=36)
        found.append(outcome(module, data, tmp_path, ["train/loss"], max_epochs=1)[0])
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], abs=1e-5)


# Distilled by the command


QUICK = [
    "--data", "Digits", "--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "150",
]  # fmt: skip
VIT = ["--student", "ViT", "--student.embed_dim", "16", "--student.num_layers", "2", "--student.num_heads", "2"]
DEIT = ["--variants.deit", "DeiTToken"]
TOKEN = ["--student.distillation_token", "true"]


def test_a_vit_is_distilled_by_every_method(tmp_path: Path) -> None:
    soft = ["--variants.soft", "DeiTToken", "--variants.soft.kind", "soft", "--variants.soft.token_weight", "0.1"]
    kd.main([*QUICK, *VIT, *TOKEN, *DEIT, *soft, "--out", str(tmp_path)])
    found = results(tmp_path)["students"]
    assert list(found) == ["ce", "kd", "cosine", "hint", "deit", "soft"]
    data = digits(test_size=None)
    test = data.split("test")
    for name, entry in found.items():
        exported = load_net(tmp_path / "seed0" / name)
        logits = exported(data.normalize(test.inputs))
        assert entry["failed"] == [None]
        correct = int((logits.argmax(1) == test.labels).sum())
        assert entry["test_correct"] == [pytest.approx(correct, abs=near_ties(logits))]
        assert sum(p.numel() for p in exported.parameters()) == entry["parameters"]


def test_the_kernels_of_another_device_are_not_asked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--teacher", "ViT", "--teacher.backend", "efficient", *VIT, *TOKEN, *DEIT, "--student.backend", "cudnn"]
    data = digits()

    def check(device: str) -> None:
        strategy = SimpleNamespace(root_device=torch.device(device))
        validates = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "max_epochs": 1}
        trainer = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=None, callbacks=[], **validates)
        monkeypatch.setattr(Session, "data", data)
        monkeypatch.setattr(Session, "trainer", lambda _: trainer)
        run = Session("kd", kd.parser(), flags)
        kd.KD(run).check()

    check("cuda")
    with pytest.raises(BadInput, match=r"^teacher\.backend efficient: expected a kernel"):
        check("cpu")
