"""Losses that relate samples see the global batch, on any number of processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice import relations
from lab.strategies import AllReduce, LocalSGD
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN
from lit_modules.objectives import DIST, PKT, RKD, SP, Hint, Hinton, Objective, Sum
from strategies import DDP, HSDP, PipelineStrategy
from tests.grids import mostly_slow
from tests.training import SHAPE, Outcome, assert_agree, assert_same, digits, fit, net, outcome, trainer, weights

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


def trained(devices: int, folder: Path, **options: Any) -> Outcome:
    """The last batch has one row: ranks are empty."""
    tags = [f"{name}/train/loss" for name in RELATING]
    return outcome(module(), digits(train_size=75), folder, tags, devices, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(1, tmp_path_factory.mktemp("alone"), precision="64-true")


# Others by any method: tests/harness/test_zoo.py
CASES: dict[str, tuple[int, Callable[[], Any]]] = {
    "ddp 2": (2, lambda: DDP(timeout=60)),
    "ddp 3": (3, lambda: DDP(timeout=60)),
    "ddp 8": (8, lambda: DDP(timeout=120)),
    "allreduce": (2, lambda: AllReduce(timeout=60)),
    "hsdp": (4, lambda: HSDP(timeout=60)),
    "accumulated": (2, lambda: DDP(timeout=60)),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "ddp 3"))
def test_any_number_of_processes_computes_one_loss(case: str, alone: Outcome, tmp_path: Path) -> None:
    devices, strategy = CASES[case]
    options: dict[str, Any] = {"accumulate_grad_batches": 2} if case == "accumulated" else {}
    expected = trained(1, tmp_path, precision="64-true", **options) if options else alone
    assert_agree(expected, trained(devices, tmp_path, precision="64-true", strategy=strategy(), **options))


PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "replicated": (4, {"data_parallel_size": 2}),
    "interleaved": (2, {"schedule": "Interleaved1F1B", "stages_per_rank": 2}),
}


@pytest.mark.parametrize("case", mostly_slow(PIPELINES, "two"))
def test_a_pipeline_under_exact_has_the_bits_of_ddp(case: str, tmp_path: Path) -> None:
    devices, options = PIPELINES[case]
    cut = PipelineStrategy(exact=4, timeout=60, **options)
    assert_agree(trained(1, tmp_path, strategy=DDP(exact=4)), trained(devices, tmp_path, strategy=cut), 0.0)


def test_exact_is_bitwise_and_what_one_process_computes(alone: Outcome, tmp_path: Path) -> None:
    one, *others = (trained(n, tmp_path, strategy=DDP(timeout=60, exact=4)) for n in (1, 2, 3))
    for other in others:
        assert_agree(one, other, 0.0)
    assert_agree(alone, trained(2, tmp_path, precision="64-true", strategy=DDP(timeout=60, exact=4)))


@pytest.mark.parametrize("name", RELATING)
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
