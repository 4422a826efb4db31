"""BatchNorm with few rows, one value a channel or no running statistics: any number of ranks trains as one."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from apprentice.batch import Batch
from apprentice.keyed import Dropout, with_seed
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import ResNet, globalise
from lit_modules.objectives import FitNet, Hinton
from strategies import FSDP, PipelineStrategy
from tests.grids import mostly_slow
from tests.training import SHAPE, assert_same, digits, fit, net, on, trainer, weights

SHAPES = {"1d": (nn.BatchNorm1d, (4,)), "1d of texts": (nn.BatchNorm1d, (4, 1)), "2d": (nn.BatchNorm2d, (4, 1, 1))}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_only_value_of_a_channel_is_normalised_by_running_statistics(shape: str, momentum: float | None) -> None:
    kind, size = SHAPES[shape]
    ours, plain = globalise(kind(4, momentum=momentum).double()), kind(4, momentum=momentum).double()
    many, one = torch.randn(5, *size, dtype=torch.float64), torch.randn(1, *size, dtype=torch.float64)
    assert torch.equal(ours(many), plain(many))
    first, second = one.clone().requires_grad_(), one.clone().requires_grad_()
    output, expected = ours(first), plain.eval()(second)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    assert torch.equal(ours(many), plain.train()(many))  # a later micro-batch, before the first goes backward
    output.square().sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=1e-12)
    assert_same(weights(ours), weights(plain))


def test_the_first_batch_needs_more_than_one_value_a_channel() -> None:
    norm = globalise(nn.BatchNorm2d(3))
    assert norm(torch.randn(1, 3, 1, 2)).shape == (1, 3, 1, 2)
    for fresh in (globalise(nn.BatchNorm2d(3)), globalise(nn.BatchNorm2d(3, track_running_stats=False))):
        with pytest.raises(ValueError, match=r"BatchNorm: expected more than one value.*\(1, 3, 1, 1\)"):
            fresh(torch.randn(1, 3, 1, 1))
    norm(torch.randn(0, 3, 1, 1))
    assert norm.num_batches_tracked == 1


class Reshaping(nn.Module):
    """Can't take a batch without rows, as most nets of transformers; its BatchNorm gets a value a row."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module] = nn.utils.parametrizations.spectral_norm) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(16, 8), nn.BatchNorm1d(32), Dropout(0.5)
        self.head = norm(nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        quarters = self.first(images.flatten(1).view(len(images), -1, 16)).view(len(images), -1)
        return self.head(self.dropout(self.norm(quarters).tanh()))


def reshaping() -> LitClassifier:
    return LitClassifier(with_seed(0, Reshaping), optimizer=partial(SGD, lr=0.1))


def exactly() -> LitClassifier:
    """Without the only buffers of `reshaping` that change and can't be merged."""
    return LitClassifier(with_seed(0, lambda: Reshaping(lambda layer: layer)), optimizer=partial(SGD, lr=0.1))


def reshaping_students() -> Distillation:
    students = {"kd": (with_seed(0, Reshaping), Hinton()), "fitnet": (with_seed(2, lambda: ResNet(8, SHAPE)), FitNet())}
    teacher = with_seed(1, lambda: ResNet(8, SHAPE))
    return Distillation(teacher, students, SHAPE, optimizer=partial(SGD, lr=0.01), teacher_cache_mb=0)


def by_rank(make: Callable[[], Any], rows: int, place: str = "auto 1", **options: Any) -> dict[str, Tensor]:
    """Weights and buffers after two epochs of batches of four, the last of `rows`, and scores of as many images."""
    data = digits(batch_size=4, train_size=16 + rows, validation_size=0.1, test_size=10)
    module = fit(make(), data, precision="64-true", **on(place) | options)
    scores = {name: torch.as_tensor(value) for name, value in module.trainer.callback_metrics.items()}
    return weights(module) | scores


CASES = [  # a rank of two or three has no row in the last batch
    ("ddp 3", 2, reshaping), ("ddp 3", 1, reshaping_students), ("ddp 2", 1, reshaping), ("fsdp 3", 1, reshaping),
    ("fsdp 3", 2, reshaping_students), ("ddp_zero1 3", 2, reshaping_students),
    ("param_server 3", 1, reshaping_students),
]  # fmt: skip


@pytest.mark.parametrize(("place", "rows", "make"), mostly_slow(CASES, *CASES[:2]))
def test_a_last_batch_of_fewer_rows_than_ranks_trains_as_on_one(place: str, rows: int, make: Callable[[], Any]) -> None:
    recomputed = {"strategy": FSDP(timeout=60, activation_checkpointing=True)} if place == "fsdp 3" else {}
    assert_same(by_rank(make, rows), by_rank(make, rows, place, **recomputed), atol=1e-9)


@pytest.mark.parametrize("rows", [1, 2])
def test_exact_shards_of_such_batches_have_the_bits_of_one_rank(rows: int) -> None:
    plain, one, three = (by_rank(exactly, rows, place) for place in ("auto 1", "ddp 1 exact 4", "ddp 3 exact 4"))
    assert_same(one, three)
    assert_same(one, plain, atol=1e-9)


def test_a_last_batch_of_one_row_leaves_the_statistics() -> None:
    make = partial(LitClassifier, optimizer=partial(SGD, lr=0.0))
    data = digits(batch_size=4, train_size=17)
    whole, without = (fit(make(with_seed(0, Reshaping)), data, limit_train_batches=n) for n in (5, 4))
    assert_same(weights(whole.net.norm), weights(without.net.norm))


def test_two_pipelines_normalise_their_micro_batches_together_also_where_one_has_no_rows() -> None:
    layers = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10)
    net, data = nn.Sequential(*layers), digits(batch_size=7, train_size=21)
    plain = copy.deepcopy(net).double()
    optimizer = SGD(plain.parameters(), 0.1)
    strategy = PipelineStrategy(data_parallel_size=2, num_microbatches=4, timeout=60)
    with warnings.catch_warnings(action="ignore"):  # BatchNorm sees a micro-batch
        options = {"strategy": strategy, "precision": "64-true", "max_epochs": 1}
        fit(LitClassifier(net, optimizer=partial(SGD, lr=0.1)), data, 4, **options)
    for batch in data.train_dataloader():
        inputs, loss = data.normalize(batch.inputs, torch.float64), torch.zeros(())
        shares = [share.tensor_split(4) for share in torch.arange(7).tensor_split(2)]  # 1, 1, 1, 1 and 1, 1, 1, 0 rows
        for pair in zip(*shares, strict=True):
            rows = torch.cat(pair)
            plain[2].train(len(rows) > 1)
            loss = loss + F.cross_entropy(plain(inputs[rows]), batch.labels[rows], reduction="sum") / 7
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_same(weights(net), weights(plain), atol=1e-9)


def normalised(seed: int) -> nn.Sequential:
    def build() -> nn.Sequential:
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.Tanh(), nn.Linear(16, 10))

    return with_seed(seed, build)


def distillation(**options: object) -> Distillation:
    students = {"kd": (net(), Hinton())}
    return Distillation(normalised(1), students, SHAPE, optimizer=partial(SGD, lr=0.1), **options)


def distilled(place: str) -> dict[str, Tensor]:
    return weights(fit(distillation(), digits(), **on(place), precision="64-true"))


def test_a_teacher_uses_global_statistics_and_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = distilled("auto 1")
    line = "teacher's outputs are not stored: they depend on the batch, by its statistics in 2\n"
    assert line in capsys.readouterr().out
    assert_same(one, distilled("ddp 3"), atol=1e-12)
    fit(distillation(teacher_cache_dir=tmp_path), digits())
    assert not list(tmp_path.iterdir())


def test_exact_shards_have_the_same_bits_on_any_number_of_ranks() -> None:
    assert_same(distilled("ddp 1 exact 4"), distilled("ddp 3 exact 4"))


def test_a_teacher_is_that_of_torch_in_training_and_evaluation() -> None:
    images, plain = torch.rand(9, *SHAPE), normalised(1).eval()
    module = distillation()
    for mode in (True, False):
        module.train(mode)
        assert not module.teacher.training
        asked = module.evaluate(Batch.of((images, torch.zeros(9)), 0, shared=False), beside=True).teacher
        assert asked is not None
        torch.testing.assert_close(asked.logits, plain(images))


@pytest.mark.parametrize("exact", ["", " exact 4"])
def test_nets_that_are_trained_and_scored_are_named_and_the_same_on_any_number_of_ranks(exact: str) -> None:
    data, values = digits(batch_size=8, train_size=20, validation_size=0.3, test_size=10), []
    for place in (f"ddp 1{exact}", f"ddp 3{exact}"):
        with pytest.warns(UserWarning, match=r"Sequential keeps no running statistics in 2: its scores for a sample "):
            module = LitClassifier(normalised(0), optimizer=partial(SGD, lr=0.1))
        runner = trainer(**on(place), precision="64-true")
        runner.fit(module, data)
        scores = dict(runner.callback_metrics)
        runner.test(module, data, verbose=False)
        scores |= runner.callback_metrics
        values.append(weights(module) | {name: torch.as_tensor(value) for name, value in scores.items()})
    assert_same(*values, atol=0.0 if exact else 1e-9)
