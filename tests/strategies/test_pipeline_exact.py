"""The exact mode in a pipeline: the bits of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, ResNet
from lit_modules.objectives import CrossEntropy
from strategies import DDP
from tests.grids import mostly_slow
from tests.pipelines import MODULES, SCHEDULES, SHAPES, Conv, Plain, Plateau, ended, fitted, pipeline
from tests.strategies.test_exact import assert_same_bits, bits
from tests.training import SHAPE, assert_same, classifier, digits, distillation, fit, net, weights


@pytest.mark.parametrize("name", mostly_slow(["teacher", "students", "resnet8"], "students"))
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ids=str,
)
def test_exact_bits_are_those_of_one_process(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_epochs": 3} | settings
    one = bits(MODULES[name], tmp_path, "ddp 1 exact 8", **settings)
    for devices, options in SHAPES.values() if len(settings) == 1 else [SHAPES["3"]]:
        strategy = partial(pipeline, exact=8, **options)
        assert_same_bits(one, bits(MODULES[name], tmp_path, f"auto {devices}", strategy, **settings))


@pytest.mark.parametrize("schedule", mostly_slow(SCHEDULES, "1F1B"))
def test_exact_bits_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    one = bits(Plateau, tmp_path, "ddp 1 exact 4")
    assert_same_bits(one, bits(Plateau, tmp_path, "auto 2", partial(pipeline, exact=4, schedule=schedule)))


@pytest.mark.slow
def test_exact_bits_of_torchvisions_resnet50() -> None:
    small = {"data": {"train_size": 21, "batch_size": 8}}
    one = fitted(MODULES["resnet50"], strategy=DDP(exact=8), **small)
    for devices, options in (SHAPES["3"], SHAPES["2x2"]):
        other = fitted(MODULES["resnet50"], devices, pipeline(exact=8, **options), **small)
        assert_same(weights(one), weights(other))


def test_exact_batch_norm_sees_a_shard_in_any_case() -> None:
    one, other = (
        fitted(lambda: classifier(ResNet, depth=8), n, strategy)
        for n, strategy in ((1, DDP(exact=8)), (2, pipeline(exact=8)))
    )
    assert_same(weights(one), weights(other))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [5, 3])  # fewer rows than micro-batches, and than stages
def test_exact_batches_smaller_than_their_number_of_shards(batch: int) -> None:
    small = {"data": {"train_size": 23, "batch_size": batch}}
    one = fitted(Conv, strategy=DDP(exact=8), **small)
    for devices, options in (SHAPES["3"], SHAPES["4"], SHAPES["2x2"]):
        assert_same(weights(one), weights(fitted(Conv, devices, pipeline(exact=8, **options), **small)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [21, 5])  # two shards and an end of two rows; one shard
def test_exact_batch_norm_in_fewer_shards_than_micro_batches(batch: int) -> None:
    small = {"data": {"train_size": 23, "batch_size": batch}}
    one = fitted(lambda: classifier(ResNet, depth=8), strategy=DDP(exact=8), **small)
    for devices, options in (SHAPES["3"], SHAPES["2x2"]):
        other = fitted(lambda: classifier(ResNet, depth=8), devices, pipeline(exact=8, **options), **small)
        assert_same(weights(one), weights(other))


@pytest.mark.slow
def test_exact_bits_on_eight_processes() -> None:
    one = fitted(Conv, strategy=DDP(exact=8))
    assert_same(weights(one), weights(fitted(Conv, 8, pipeline(exact=8))))


class Replaces(Callback):
    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            layer = module.net[-1]
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            trainer.optimizers[0].add_param_group({"params": [layer.weight]})


def test_a_parameter_that_is_replaced_in_a_fit_goes_on_training() -> None:
    options: dict[str, Any] = {"callbacks": [Replaces()], "use_distributed_sampler": False}
    plain, _ = ended(Plain, **options)
    exact, _ = ended(Plain, DDP(exact=4), devices=1, **options)
    assert_same(plain, exact, atol=1e-12)
    for strategy in (DDP(timeout=60, exact=4), pipeline(exact=4)):
        assert_same(exact, ended(Plain, strategy, **options)[0])


class Unfreezes(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[-1].requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.net.requires_grad_(True)
        return super().training_step(batch)


@pytest.mark.parametrize("exact", [None, 4])
def test_a_step_that_unfreezes_a_layer_is_refused(exact: int | None) -> None:
    with pytest.raises(Exception, match=r"unfreezes and replaces no parameter, as a hook may; it does so with net\.3"):
        ended(Unfreezes, pipeline(exact=exact))


def test_a_student_that_fails_is_frozen_alone() -> None:
    students = {"bad": (net(), CrossEntropy()), "ce": (net(), CrossEntropy())}
    with torch.no_grad():
        students["bad"][0].classifier[3].weight.fill_(float("inf"))
    module = Distillation(net(DeepNN), students, input_shape=SHAPE)
    before = weights(module)
    fit(module, digits(), 2, strategy=pipeline(exact=8))
    alone = fitted(lambda: distillation(["ce"]), strategy=DDP(exact=8))
    ended = {k: v for k, v in weights(module).items() if k.startswith("students.ce")}
    assert_same(ended, {k: v for k, v in weights(alone).items() if k.startswith("students.ce")})
    assert_same(
        {k: v for k, v in weights(module).items() if "bad" in k}, {k: v for k, v in before.items() if "bad" in k}
    )
