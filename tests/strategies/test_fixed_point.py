"""Sums of gradients whose bits don't depend on the order of the addends, of any size."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.runs.quiet import quiet
from strategies import DDP
from strategies.exact.fixed_point import MOST_ADDENDS, FixedPointSum
from tests.training import assert_same, trainer, weights

Grads = Sequence[Tensor | None]
RIGHT = {torch.float32: Fraction(1, 2**41), torch.float64: Fraction(1, 2**70)}  # of each addend
ENDS = {torch.float32: (-149, 127), torch.float64: (-1074, 959)}  # exponents of the smallest and the largest number


def parameter(like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(like))


def filled(p: nn.Parameter, grads: Grads, addends: int) -> FixedPointSum:
    total = FixedPointSum({"p": p}, addends)
    for grad in grads:
        p.grad = None if grad is None else grad.clone()
        total.add()
    assert p.grad is None
    return total


def added(p: nn.Parameter, grads: Grads) -> Tensor:
    total = filled(p, grads, len(grads))
    assert total.flawed_names() == []
    (found,) = total.divide(1.0)
    assert found is not None
    return found


def spread(dtype: torch.dtype, seed: int, count: int, size: int = 40) -> list[Tensor]:
    """Gradients with numbers of all sizes, from 1e-30 to 1e30, none of them at the other's size."""
    generator = torch.Generator().manual_seed(seed)
    wide = [torch.rand(size, generator=generator, dtype=torch.float64) * 60 - 30 for _ in range(count)]
    signed = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(sign * 10.0**exponent).to(dtype) for sign, exponent in zip(signed, wide, strict=True)]


def around(dtype: torch.dtype, exponent: int, seed: int, count: int, size: int = 40) -> list[Tensor]:
    """Gradients whose largest number is 2^exponent, the others down to 2^-60 of it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        signed = torch.rand(size, generator=generator, dtype=torch.float64) * 2 - 1
        below = torch.randint(0, 61, (size,), generator=generator)
        below[0], signed[0] = 0, 1
        found.append(torch.ldexp(torch.ldexp(signed, -below), torch.tensor(exponent)).to(dtype))
    return found


def check(found: Tensor, grads: list[Tensor], dtype: torch.dtype) -> None:
    """Each element is the exact sum, but for what is allowed and its rounding to the type."""
    largest = max(Fraction(abs(x)) for grad in grads for x in grad.tolist())
    rounding, smallest = Fraction(torch.finfo(dtype).eps), Fraction(2) ** ENDS[dtype][0]
    for i, x in enumerate(found.tolist()):
        right = sum(Fraction(grad[i].item()) for grad in grads)
        assert abs(Fraction(x) - right) <= largest * len(grads) * RIGHT[dtype] + abs(right) * rounding + smallest


@pytest.mark.parametrize("dtype", RIGHT, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
def test_each_element_is_right_whatever_the_size(dtype: torch.dtype, count: int) -> None:
    low, high = ENDS[dtype]
    sizes = range(low, high - 5, 11 if dtype == torch.float32 else 83)
    for seed, exponent in enumerate(sizes):
        grads = around(dtype, exponent, seed, count)
        check(added(parameter(grads[0]), grads), grads, dtype)
    grads = spread(dtype, count, count)
    check(added(parameter(grads[0]), grads), grads, dtype)


@pytest.mark.parametrize("dtype", RIGHT, ids=str)
def test_as_many_as_are_allowed(dtype: torch.dtype) -> None:
    grads = around(dtype, 5, 0, MOST_ADDENDS, size=3)
    found = added(parameter(grads[0]), grads)
    check(found, grads, dtype)
    assert torch.equal(found, added(parameter(grads[0]), grads[::-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_sum_has_no_order(dtype: torch.dtype) -> None:
    shape = torch.empty(4, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, 3, 2, 2, generator=generator, dtype=dtype).mul(10.0 ** (6 * i - 12)) for i in range(5)]
    p = parameter(shape)
    sums = [added(p, list(order)) for order in itertools.permutations(grads)]
    assert all(torch.equal(sums[0], other) for other in sums)
    assert sums[0].stride() == p.stride()


def test_numbers_at_the_edge_of_a_bin_have_no_order() -> None:
    """Just below a power of two a number rounds up to where the next bin begins."""
    p = nn.Parameter(torch.empty(3))
    for power in range(-45, 45, 2):
        edge = torch.tensor([1.0, -1.0, 0.75]).mul(2.0**power).nextafter(torch.zeros(3))
        for growth in (1.0, 2.0**21, 2.0**45, 2.0**66):
            larger = torch.tensor([0.1, 0.3, growth]).mul(2.0**power)
            sums = [added(p, order) for order in itertools.permutations([edge, larger, edge / 3])]
            assert all(torch.equal(sums[0], other) for other in sums)


@pytest.mark.parametrize("dtype", RIGHT, ids=str)
def test_sums_of_the_longest_numbers_are_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    lengths = range(18, 25) if dtype == torch.float32 else range(45, 54)  # bits, all of them ones
    for power in range(-30, 30):
        ones = torch.tensor([2.0**power - 2.0 ** (power - n) for n in lengths], dtype=torch.float64).to(dtype)
        p = parameter(ones)
        assert torch.equal(added(p, [ones] * 5 + [-ones] * 3), 2 * ones)


def test_zeros_none_and_flaws() -> None:
    made = {name: nn.Parameter(torch.empty(2)) for name in ("zero", "none", "late", "empty")}
    made["empty"] = nn.Parameter(torch.empty(0))
    total = FixedPointSum(made, 8)
    for late in (None, torch.tensor([1e-40, -3.0])):
        made["zero"].grad, made["late"].grad, made["empty"].grad = torch.zeros(2), late, torch.zeros(0)
        total.add()
    zero, none, found, empty = total.divide(0.5)
    assert none is None
    assert [x.tolist() for x in (zero, found, empty) if x is not None] == [[0, 0], [0, -6], []]
    for bad in (float("nan"), float("inf"), -float("inf")):
        total.clear()
        for value in (1.0, bad, 1.0):
            made["zero"].grad, made["late"].grad = torch.ones(2), torch.tensor([1.0, value])
            total.add()
        assert total.flawed_names() == ["late"]
        zero, _, late, _ = total.divide(1.0)
        assert zero is not None
        assert zero.tolist() == [3, 3]
        assert late is None


def test_a_sum_is_infinite_only_where_its_mean_is() -> None:
    largest = torch.finfo(torch.float32).max
    p = nn.Parameter(torch.empty(2))
    total = filled(p, [torch.tensor([largest, -(2.0**100)])] * 8, 8)
    mean, sums = total.divide(8.0)[0], total.divide(1.0)[0]
    assert mean is not None
    assert sums is not None
    assert mean.tolist() == [largest, -(2.0**100)]
    assert sums.tolist() == [float("inf"), -(2.0**103)]


# In training


class Regression(LightningModule):
    """Squared errors, in units of one's own; rows may be weighted."""

    def __init__(self, unit: float = 1.0, lr: float = 1e-3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.unit, self.lr = unit, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, scale = (x.to(self.dtype) for x in batch)
        return ((self.net(inputs)[:, 0] - targets).square() * scale).mean() * self.unit

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def regressed(targets: float, scales: float = 0.0, devices: int = 1, exact: int | None = 8, **kwargs: Any) -> Any:
    """Weights after two epochs of 3 batches, the last of 5 rows; row i of 32 is scaled by up to 10^±scales."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(37, 5, generator=generator)
    rows = 10.0 ** (torch.rand(37, generator=generator, dtype=torch.float64) * 2 * scales - scales)
    data = TensorDataset(inputs, targets * (1 + inputs.sum(1)), rows)
    precision = kwargs.pop("precision", "32-true")
    module = Regression(**kwargs)
    strategy = DDP(timeout=60, exact=exact) if exact else "auto"
    with quiet():
        options = {"strategy": strategy, "precision": precision, "use_distributed_sampler": False}
        trainer(devices, **options).fit(module, DataLoader(data, 16))
    return weights(module)


PLAIN = {
    "targets around 20000": {"targets": 20000.0, "lr": 1e-7},
    "gradients around 1e-12": {"targets": 1.0, "unit": 1e-12, "lr": 1e10},
    "around 1e-27": {"targets": 1.0, "unit": 1e-27, "lr": 1e25},
    "around 1e37": {"targets": 1.0, "unit": 1e37, "lr": 1e-39},
}


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("case", PLAIN)
def test_gradients_of_any_size_train_as_plain_float64_does(case: str) -> None:
    plain = regressed(**PLAIN[case], exact=None, precision="64-true")
    single, double = (regressed(**PLAIN[case], precision=precision) for precision in ("32-true", "64-true"))
    assert_same(plain, double, atol=1e-12)
    for key in plain:
        torch.testing.assert_close(single[key].double(), plain[key], rtol=2e-6, atol=2e-6)
    start = weights(Regression())
    assert all((plain[key] - start[key]).abs().max() > 1e-3 for key in plain)


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_shards_of_all_sizes_have_the_same_bits_on_any_devices(precision: str) -> None:
    """Each shard's gradients are of another size, so what they are added up in grows within a step and over ranks."""
    one = regressed(1.0, scales=14, lr=1e-15, precision=precision)
    for devices in (2, 3):
        assert_same(one, regressed(1.0, scales=14, lr=1e-15, devices=devices, precision=precision))
