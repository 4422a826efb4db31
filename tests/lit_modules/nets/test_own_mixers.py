"""A user's mixer in a GPT and in the place of a teacher's attention: as one of ours, or refused in a line."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.keyed import with_seed
from harness.studies.text.costs import check_decoding, decoding_ms
from lit_modules.nets import GPT, Mixer, Pruned, attention_maps
from lit_modules.nets.generation import check_writer
from lit_modules.nets.layers import check_keeps_apart
from lit_modules.nets.specs import rebuild
from lit_modules.objectives import Linearize
from tests.commands import bad_input
from tests.own_mixers import EXAMPLE, IN_PYTHON, example_mixer, mixers_of

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])


class Lag(nn.Module):
    """Each token with the `width` - 1 before it: forward alone, of a kernel as wide as it is told."""

    def __init__(self, embed_dim: int, width: int = 2, ahead: int = 0) -> None:
        super().__init__()
        self.width, self.ahead = width, ahead
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(3 * embed_dim, embed_dim)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(self.qkv(x), (0, 0, self.width - 1 - self.ahead, self.ahead))
        mixed: Tensor = self.out(x.unfold(1, self.width, 1).mean(-1))
        return mixed


class Masked(Lag):
    """One that gives weights, reads masks and forgets them."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.eye(x.shape[1]).expand(len(x), 1, -1, -1) * (1 if mask is None else mask)


class Silent(nn.Module):
    """One without a forward."""


class Half(Lag):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., ::2]


class Infinite(Lag):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0


class Deaf(Lag):
    """One that has a cache, and takes none."""

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> object:
        return object()


def gpt(mixer: Any, **options: Any) -> GPT:
    return with_seed(0, lambda: GPT(11, 16, **{"num_layers": 2, "num_heads": 2, "embed_dim": 8} | options, mixer=mixer))


def test_the_page_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 25
    (tmp_path / "mymixer.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(IN_PYTHON, "own-mixer.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([2, 10, 65]) torch.Size([2, 110])\n"


@torch.no_grad()
def test_the_pages_mixer_is_the_mean_and_decodes() -> None:
    mean = with_seed(0, lambda: example_mixer()(8)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = torch.stack([mean.out(x[:, : place + 1].mean(1)) for place in range(5)], 1)
    torch.testing.assert_close(mean(x), expected, rtol=0, atol=1e-12)
    net = gpt(example_mixer())
    check_writer(net)  # of padded texts
    assert net.cache_bytes(9, 4) == 2 * 8 * 4


def test_a_mixer_is_given_what_it_names() -> None:
    made: list[dict[str, Any]] = []

    def make(embed_dim: int, layer: int, width: int = 3) -> Lag:
        made.append({"embed_dim": embed_dim, "layer": layer, "width": width})
        return Lag(embed_dim, width)

    assert [x.width for x in mixers_of(gpt(make, softmax_layers=[0], num_layers=3))[1:]] == [3, 3]
    assert made == [{"embed_dim": 8, "layer": (1 << 16) + number, "width": 3} for number in (1, 2)]
    bound = gpt(functools.partial(Lag, width=5))
    assert mixers_of(bound)[1].width == 5
    again = GPT(**rebuild(bound.init_args))
    again.load_state_dict(bound.state_dict())
    assert torch.equal(again(TOKENS), bound(TOKENS))
    assert gpt(functools.partial(make, layer=7)) is not None
    assert made[-1]["layer"] == 7


def test_forward_alone_is_enough() -> None:
    net = gpt(Lag)
    check_decoding(net, "net")
    assert net.generate(TOKENS, 3).shape == (2, 9)
    assert net.decoder(9, None) is None
    line = bad_input(check_decoding, net, "variants.mine", is_timed=True)
    assert line.startswith("variants.mine GPT: expected a net whose mixers all have new_cache()")
    pruned = Pruned(layers=[1])
    kept, second = mixers_of(pruned.make(net, pruned.first(net)))[0], mixers_of(net)[1]
    assert torch.equal(kept.qkv.weight, second.qkv.weight)


def test_a_cache_is_timed_with_the_mixer() -> None:
    assert (decoding_ms(gpt(example_mixer()), 8) or 0) > 0


def test_maps_and_packed_texts_are_of_mixers_that_have_them() -> None:
    net = gpt(Masked)
    assert [*attention_maps(net, TOKENS)] == ["blocks.0.attention", "blocks.1.attention"]
    assert "with attention that has weights" in bad_input(attention_maps, gpt(Lag), TOKENS)
    assert "mixes the texts of a row" in bad_input(check_keeps_apart, net, "net")
    assert "GPT, chosen by `net`, can't keep apart" in bad_input(check_keeps_apart, gpt(Lag), "net")


class Chunks(Lag):
    """It sees the whole of a chunk of four tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1)[:, : x.shape[1]])


@pytest.mark.parametrize(
    ("mixer", "line"),
    [
        (Silent, "mixer Silent: expected a module whose forward takes tokens (B, T, 8) alone; it says: Module ["),
        (Lag, "window 3: expected its default with mixer=Lag"),
        (lambda: None, "mixer <lambda>: expected what makes an nn.Module; it gives NoneType"),
        (lambda size: Lag(1 + size), "mixer <lambda>: expected a class or function of embed_dim, num_heads and"),
        (lambda: Lag(6), "mixer Lag: expected a module whose forward takes tokens (B, T, 8) alone; it says: "),
        (Half, "mixer Half: expected outputs (2, 8, 8) of as many tokens; it gives (2, 8, 4)"),
        (Infinite, "mixer Infinite: expected finite outputs"),
        (Chunks, "mixer Chunks: expected one that sees earlier tokens alone: what it gives"),
        (functools.partial(Lag, ahead=1), "mixer Lag: expected one that sees earlier tokens alone: what it gives"),
    ],
)  # fmt: skip
def test_what_is_no_mixer_is_refused_when_the_net_is_made(mixer: Any, line: str) -> None:
    options = {"window": 3} if line.startswith("window") else {}
    assert bad_input(gpt, mixer, **options).startswith(line)


def test_what_fails_or_looks_ahead_later_is_refused_before_training() -> None:
    line = bad_input(check_decoding, gpt(Deaf), "net")
    assert line.startswith("net GPT: expected a net that continues texts; it says: ")
    assert "unexpected keyword argument 'cache'" in line
    net = gpt(Lag)
    net.blocks[0].attention = nn.Sequential(Lag(8, 2, ahead=1), nn.Linear(8, 8))  # in the place of the checked one
    nn.init.normal_(mixers_of(net)[0][0].out.weight)
    assert bad_input(check_decoding, net, "net") == (
        "net GPT: expected a language model: what it gives for a token depends on no later ones"
    )


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_it_takes_the_place_of_a_teachers_attention(kv_heads: int | None) -> None:
    """With the teacher's projections where it has layers of their names and shapes."""
    teacher = gpt("softmax", position="rotary", num_kv_heads=kv_heads, num_layers=3)
    for mixer, copied in ((Lag, {"qkv"}), (example_mixer(), {"out"})):
        student = Mixer(mixer, softmax_layers=1)
        net = student.make(teacher, student.choose(teacher, TOKENS, TOKENS.roll(-1, 1)))
        ours, theirs = net.state_dict(), teacher.state_dict()
        for key in theirs.keys() & ours.keys():
            is_replaced = "attention" in key and ours[key].shape != theirs[key].shape
            assert is_replaced or torch.equal(ours[key], theirs[key])
        numbers = [n for n, part in enumerate(mixers_of(net)) if type(part).__name__ == mixer.__name__]
        assert len(numbers) == 2
        for number in numbers:
            part = mixers_of(net)[number].get_submodule(*copied)
            expected = mixers_of(teacher)[number].get_submodule(*copied).weight
            assert torch.equal(part.weight[:8], expected[:8])
        assert net.init_args["position"] == "rotary"  # of the block that stays
        method = Linearize()
        method.choose(net, teacher)
        assert len(method.parts()) == 2
    assert Mixer(Lag).make(teacher, Mixer(Lag).first(teacher)).init_args["position"] is None


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mixer": "nothing"}, "mixer nothing: expected one of windowed, linear, gated, delta, or a class of your own"),
        ({"mixer": Lag, "window": 3}, "window 3: expected null, or mixer=windowed; Lag has none"),
        ({"mixer": Lag, "conv": 3}, "conv 3: expected null, or mixer="),
    ],
)  # fmt: skip
def test_options_of_other_replacements_are_refused(options: dict[str, Any], line: str) -> None:
    assert bad_input(lambda: Mixer(**options)).startswith(line)


def test_a_teacher_of_own_mixers_has_no_attention_to_replace() -> None:
    student = Mixer()
    assert bad_input(student.first, gpt(Lag)) == "teacher.mixer Lag: expected softmax, which is replaced"
    assert bad_input(
        Mixer(functools.partial(Lag, ahead=1)).make, gpt("softmax"), student.first(gpt("softmax"))
    ).startswith("mixer Lag: expected one that sees earlier tokens alone")
