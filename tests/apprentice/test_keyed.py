"""Noise depends on its keys alone."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from apprentice import keyed
from lit_modules.nets import SelfAttention

ROWS = torch.arange(128)


def test_rows_draw_the_same_alone_and_in_company() -> None:
    whole = keyed.bits(7, ROWS, 50)
    for part in ROWS.tensor_split(5):
        assert torch.equal(keyed.bits(7, part, 50), whole[part])
    assert torch.equal(keyed.bits(7, ROWS, 20), whole[:, :20])


def test_bits_are_those_of_the_published_hash() -> None:
    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    values = [0, 1, 2, 12345, 2**31, 2**32 - 1]
    assert keyed.mix(torch.tensor(values)).tolist() == [lowbias32(v) for v in values]


def test_bits_are_uniform_and_uncorrelated() -> None:
    drawn = keyed.bits(keyed.fold_in(1, 2, 3), torch.arange(2000), 500).double() / 2**32
    assert abs(drawn.mean() - 0.5) < 3 * (1 / 12) ** 0.5 / 1000
    assert abs(drawn.var() - 1 / 12) < 1e-3
    assert torch.corrcoef(drawn[:40]).fill_diagonal_(0).abs().max() < 0.25
    assert torch.corrcoef(drawn.T[:40]).fill_diagonal_(0).abs().max() < 0.12


def test_every_key_and_its_place_counts() -> None:
    keys = {
        keyed.fold_in(*k) for k in [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**32,), (2**33,), (-1,), (1, 2, 3), (3, 2, 1)]
    }
    assert len(keys) == 10


def test_dropout_is_keyed_by_seed_step_layer_and_row() -> None:
    x = torch.ones(128, 4, 8)
    layer, other = keyed.Dropout(0.3), keyed.Dropout(0.3, layer=1)

    def masked(seed: int, step: int, rows: torch.Tensor, module: keyed.Dropout = layer) -> torch.Tensor:
        with keyed.noise(seed, step, rows):
            return module(x[: len(rows)])

    whole = masked(0, 5, ROWS)
    assert torch.equal(whole, masked(0, 5, ROWS))
    for part in ROWS.tensor_split(3):
        assert torch.equal(masked(0, 5, part), whole[part])
    for different in (masked(1, 5, ROWS), masked(0, 6, ROWS), masked(0, 5, ROWS, other)):
        assert not torch.equal(different, whole)
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - 0.3).item()}
    assert abs((whole == 0).float().mean() - 0.3) < 0.03
    assert abs(whole.mean() - 1) < 0.05


def test_channels_are_dropped_as_one() -> None:
    x, layer = torch.ones(128, 16, 3, 5), keyed.Dropout(0.25, channels=True)
    with keyed.noise(0, 5, ROWS):
        whole = layer(x)
    with keyed.noise(0, 5, ROWS[7:9]):
        assert torch.equal(layer(x[:2]), whole[7:9])
    assert torch.equal(whole, whole[:, :, :1, :1].expand_as(x))
    assert abs((whole == 0).float().mean() - 0.25) < 0.03
    outside = layer(x)
    assert torch.equal(outside.amax((2, 3)), outside.amin((2, 3)))


def test_dropout_outside_a_step_is_torchs_and_in_eval_nothing() -> None:
    x = torch.ones(100, 100)
    assert 0.4 < (keyed.Dropout(0.5)(x) == 0).float().mean() < 0.6
    assert torch.equal(keyed.Dropout(0.5).eval()(x), x)


def test_dropout_refuses_what_it_cannot_key() -> None:
    with pytest.raises(ValueError, match="at least 0, less than 1"):
        keyed.Dropout(1.0)
    with keyed.noise(0, 0, ROWS), pytest.raises(ValueError, match="got 3 rows"):
        keyed.Dropout(0.5)(torch.ones(3, 2))


def test_layers_with_noise_of_torchs_own_are_named() -> None:
    layers = {
        "dropout": nn.Dropout2d(0.1), "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
        "rnn": nn.GRU(3, 3, 2, dropout=0.2), "depth": StochasticDepth(0.1, "row"),
        "ours": SelfAttention(4, 2, dropout=0.1, backend="flash"), "written": SelfAttention(4, 2, dropout=0.1),
        "none": nn.Dropout(0.0), "quiet": nn.LSTM(3, 3), "frozen": nn.Dropout(0.2).eval(), "keyed": keyed.Dropout(0.1),
    }  # fmt: skip
    assert keyed.find_unkeyed_layers(nn.ModuleDict(layers)) == ["dropout", "attention", "rnn", "depth", "ours"]


def test_seeded_makes_the_same_from_every_generator_and_leaves_their_states() -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002

    def reset() -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)

    reset()
    expected = draw()
    reset()
    first = keyed.with_seed(2**40 + 5, draw)
    assert draw() == expected
    assert keyed.with_seed(2**40 + 5, draw) == first
    assert all(a != b for a, b in zip(first, keyed.with_seed(0, draw), strict=True))
    reset()
    with pytest.raises(ZeroDivisionError):
        keyed.with_seed(3, lambda: [draw(), 1 / 0])
    assert draw() == expected
