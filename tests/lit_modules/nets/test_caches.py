"""Caches of all mixers: reordered = each text by itself, cropped = never written, a state = a net of longer texts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.keyed import with_seed
from lit_modules.nets import GPT
from lit_modules.nets.generation import CachedDecoder, Sampling, generate
from lit_modules.nets.specs import rebuild
from tests.commands import bad_input
from tests.lit_modules.nets.test_attention_nets import OPTIONS, make
from tests.own_mixers import example_mixer

T = 12
OWN = {"own": {"mixer": example_mixer(), "position": None}}  # that of docs/own-mixer.md
CASES = {**OPTIONS, **OWN}
# Of windows, tokens that are cached and how many of them stay: none has left the window.
SHORT = {"window": (6, 4), "windowed": (2, 1)}
STATES = ("linear", "gated", "delta", "own")
PADDING = (None, torch.tensor([1, 0, 0]))


def build(case: str, **options: Any) -> GPT:
    return make(case, **options) if case in OPTIONS else make("none", **OWN[case], scale=None)


def draw(rows: int, length: int = T, seed: int = 2) -> Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(seed))


def decoder(net: GPT, padding: Tensor | None = None) -> CachedDecoder:
    made = net.eval().decoder(T, padding)
    assert made is not None
    return made


def decode(net: GPT, tokens: Tensor, padding: Tensor | None, known: int) -> Tensor:
    """Logits (b, t, V) after each token from `known` - 1 on, one by one, of a new cache."""
    step = decoder(net, padding)
    return torch.stack([step(tokens[:, :known]), *map(step, tokens[:, known:].split(1, 1))], 1)


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDING, ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_reordered_texts_go_on_as_by_themselves(case: str, padding: Tensor | None) -> None:
    net, known, rows = build(case), 7, torch.tensor([2, 0, 0, 1])
    step = decoder(net, padding)
    step(draw(3)[:, :4])
    for place in range(4, known):
        step(draw(3)[:, place : place + 1])
    step.reorder(rows)
    texts = torch.cat([draw(3)[rows, :known], draw(4, seed=3)[:, known:]], 1)
    steps = torch.stack([step(token) for token in texts[:, known:].split(1, 1)], 1)
    expected = decode(net, texts, None if padding is None else padding[rows], known)
    torch.testing.assert_close(steps, expected[:, 1:], rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDING, ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_cropped_was_never_written(case: str, padding: Tensor | None) -> None:
    net, (length, kept) = build(case), SHORT.get(case, (9, 6))
    step = decoder(net, padding)
    step(draw(3)[:, :1])
    step(draw(3)[:, 1:length])
    if case in STATES or case == "hybrid":
        assert "can't take some back" in bad_input(step.crop, kept)
        kept = length  # and the rest is as before
    step.crop(kept)
    texts = torch.cat([draw(3)[:, :kept], draw(3, seed=3)[:, kept:]], 1)
    rest = texts[:, kept:]
    steps = torch.cat([step.every(rest[:, :3]), *(step.every(token) for token in rest[:, 3:].split(1, 1))], 1)
    torch.testing.assert_close(steps, decode(net, texts, padding, kept)[:, 1:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_what_can_not_be_taken_back_is_said() -> None:
    for case, line in {
        "window": "length 6: expected 7, all tokens: those that left the window of 4 are not kept",
        "windowed": "length 6: expected 7, all tokens: those that left the window are kept as their sum",
        "delta": "length 6: expected 7, all tokens: State can't take some back; copy.deepcopy it before them",
        "none": "",
    }.items():
        step = decoder(build(case))
        step(draw(2)[:, :7])
        assert bad_input(step.crop, 8) == "length 8: expected 0 to 7, the tokens that are cached"
        assert bad_input(step.reorder, torch.tensor([0.5])).startswith("rows (1,) torch.float32: expected (b,) int64")
        if line:
            assert bad_input(step.crop, 6) == line
    step.caches = [object()]
    assert bad_input(step.crop, 3) == "cache object: expected one with crop(), as MixerCache has"


@torch.no_grad()
@pytest.mark.parametrize("case", ["windowed", *STATES])
def test_a_net_with_a_state_writes_beyond_its_block(case: str) -> None:
    first = build(case, **({} if case in {"windowed", "own"} else {"position": None}))  # which have others, or none
    net, longer = (GPT(**rebuild(first.init_args | {"block_size": size})).double() for size in (5, 40))
    for copy in (net, longer):
        copy.load_state_dict(first.state_dict())
    for known in (3, 8):
        prompts = draw(2, known)
        expected = longer.generate(prompts, 20)
        assert torch.equal(net.generate(prompts, 20), expected)
        assert torch.equal(net.generate(prompts, 20, cached=False), expected)
        assert net.generate(prompts).shape == (2, max(5, known))
    torch.testing.assert_close(net(draw(2)), longer(draw(2)), rtol=0, atol=0)
    lengths = torch.tensor([8, 2])
    written, whole = (generate(x, draw(2, 8), lengths, 20, sampling=Sampling(0.0)) for x in (net, longer))
    assert torch.equal(written.tokens, whole.tokens)
    assert written.lengths.tolist() == [20, 20]


@pytest.mark.parametrize(
    "options", [{"mixer": "delta"}, {"position": None}, {"mixer": "gated", "position": None, "softmax_layers": [1]}]
)
def test_other_nets_stop_at_their_block(options: dict[str, Any]) -> None:
    net = with_seed(0, lambda: GPT(11, 5, 2, 2, 8, **options))
    assert net.generate(draw(2, 3), 20).shape == (2, 5)
    assert bad_input(net.generate, draw(2, 6)) == "tokens (2, 6): expected prompts of 1 to 5 tokens"
    assert bad_input(net, draw(2, 6)) == "tokens (2, 6): expected texts of at most 5, the block size"
