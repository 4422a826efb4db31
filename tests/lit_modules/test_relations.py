"""Losses that relate samples see the global batch, on any number of processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice import relations
from lab.strategies import LocalSGD
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN
from lit_modules.objectives import DIST, PKT, RKD, SP, Hint, Hinton, Objective, Sum
from strategies import PipelineStrategy
from tests.grids import mostly_slow
from tests.training import SHAPE, Outcome, assert_agree, assert_same, digits, fit, net, on, outcome, trainer, weights

RELATING: dict[str, Callable[[], Objective]] = {
    "rkd": RKD,
    "sp": SP,
    "pkt": PKT,
    "dist": DIST,
    "both": lambda: Sum([RKD(angle_weight=0), Hint()], [0.5, 1.0]),
}


def module(*names: str, seed: int = 0) -> Distillation:
    students = {name: (net(), RELATING[name]()) for name in names or RELATING}
    others = {} if names else {"kd": (net(), Hinton())}
    return Distillation(net(DeepNN, seed=1), students | others, input_shape=SHAPE, seed=seed)


def trained(folder: Path, place: str, **options: Any) -> Outcome:
    """The last batch has one row: ranks are empty."""
    tags = [f"{name}/train/loss" for name in RELATING]
    return outcome(module(), digits(train_size=75), folder, tags, **on(place) | options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(tmp_path_factory.mktemp("alone"), "auto 1", precision="64-true")


# Others by any method: tests/harness/test_zoo.py
PLACES = ["ddp 2", "ddp 3", "ddp 8", "ddp_allreduce 2", "hsdp 4", "ddp 2 exact 4"]


@pytest.mark.parametrize("place", mostly_slow(PLACES, "ddp 3"))
def test_any_number_of_processes_computes_one_loss(place: str, alone: Outcome, tmp_path: Path) -> None:
    assert_agree(alone, trained(tmp_path, place, precision="64-true"))


@pytest.mark.slow
def test_micro_batches_relate_their_own_rows_on_any_number_of_processes(tmp_path: Path) -> None:
    options = {"precision": "64-true", "accumulate_grad_batches": 2}
    assert_agree(trained(tmp_path, "auto 1", **options), trained(tmp_path, "ddp 2", **options))


CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicated": (4, {"data_parallel_size": 2}),
    "interleaved": (2, {"schedule": "Interleaved1F1B", "stages_per_rank": 2}),
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(tmp_path_factory.mktemp("exact"), "ddp 1 exact 4")


EXACT = ["ddp 2 exact 4", "ddp 3 exact 4", "pipeline 2 exact 4"]


@pytest.mark.parametrize("place", mostly_slow(EXACT, *EXACT[1:]))
def test_exact_is_bitwise(place: str, exact: Outcome, tmp_path: Path) -> None:
    assert_agree(exact, trained(tmp_path, place), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CUTS)
def test_so_it_is_in_other_pipelines(case: str, exact: Outcome, tmp_path: Path) -> None:
    devices, options = CUTS[case]
    strategy = PipelineStrategy(exact=4, timeout=60, **options)
    assert_agree(exact, trained(tmp_path, f"auto {devices}", strategy=strategy), 0.0)


@pytest.mark.parametrize("name", mostly_slow(RELATING, "both"))
def test_alone_as_in_company(name: str, tmp_path: Path) -> None:
    both = fit(module(), digits(train_size=75))
    own = {key: x for key, x in weights(both).items() if key.startswith(f"students.{name}.")}
    assert_same(weights(fit(module(name), digits(train_size=75))), own)


@pytest.mark.parametrize("strategy", [LocalSGD, PipelineStrategy])
def test_strategies_without_a_global_batch_refuse(strategy: Any) -> None:
    # A pipeline relates micro-batches, and not under --exact.
    with pytest.raises(ValueError, match=r"^strategy \w+: expected objectives that don't relate rows"):
        trainer(2, strategy=strategy(timeout=60)).fit(module("rkd"), digits())


def test_a_rows_loss_has_the_gradient_of_all() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, generator=g, dtype=torch.float64, requires_grad=True)

    def relation(x: torch.Tensor) -> Any:
        losses = (x @ x.T).exp().sum(1)
        return losses, {"half": losses / 2}

    weight = torch.rand((), generator=g, dtype=torch.float64)
    losses, values = relations.relate(relation, x, torch.arange(5), 5)
    (found,) = torch.autograd.grad(losses.sum() * weight, x)
    (expected,) = torch.autograd.grad(relation(x)[0].sum() * weight, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(values["half"], losses / 2)
    sharded, total = relations.ShardedRelations(5), torch.zeros_like(x)
    for part in (range(2), range(2, 5)):
        with sharded.shard():
            relations.relate(relation, x[list(part)], torch.tensor(part), len(part))
    sharded.compute()
    for part in (range(2), range(2, 5)):
        with sharded.shard():
            some, _ = relations.relate(relation, x[list(part)], torch.tensor(part), len(part))
        assert torch.equal(some, losses[list(part)])
        total += torch.autograd.grad(some.sum() * weight, x)[0]
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
