"""The exact mode in a pipeline has the bits of one process, and checkpoints of a pipeline are those of one device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, ResNet
from lit_modules.objectives import CrossEntropy
from strategies import DDP
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.pipelines import MODULES, SCHEDULES, SHAPES, Conv, Make, Plain, Plateau, ended, fitted, pipeline
from tests.processes import launch
from tests.strategies.test_exact import Bits, assert_same_bits, bits
from tests.training import SHAPE, assert_same, classifier, digits, distillation, fit, net, trainer, weights

CLIPPED: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("students", CLIPPED, ["3"]), ("students", {}, [*SHAPES]), ("teacher", {}, ["3"]), ("resnet8", CLIPPED, ["2x2"]),
]  # fmt: skip


@pytest.mark.parametrize("case", mostly_slow(range(len(CASES)), 0), ids=lambda case: CASES[case][0])
def test_exact_bits_are_those_of_one_process(case: int, tmp_path: Path) -> None:
    name, settings, shapes = CASES[case]
    settings = {"max_epochs": 3} | settings
    one = bits(MODULES[name], tmp_path, "ddp 1 exact 8", **settings)
    for devices, options in map(SHAPES.__getitem__, shapes):
        strategy = partial(pipeline, exact=8, **options)
        assert_same_bits(one, bits(MODULES[name], tmp_path, f"auto {devices}", strategy, **settings))


@pytest.fixture(scope="module")
def plateau(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    return bits(Plateau, tmp_path_factory.mktemp("plateau"), "ddp 1 exact 4")


@pytest.mark.parametrize("schedule", mostly_slow(SCHEDULES, "1F1B"))
def test_exact_bits_under_every_schedule(schedule: str, plateau: Bits, tmp_path: Path) -> None:
    assert_same_bits(plateau, bits(Plateau, tmp_path, "auto 2", partial(pipeline, exact=4, schedule=schedule)))


@pytest.mark.slow
def test_exact_bits_of_torchvisions_resnet50() -> None:
    small: dict[str, Any] = {"data": {"train_size": 21, "batch_size": 8}, "max_epochs": 1}
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
    for devices, options in (SHAPES["4"], SHAPES["2x2"]):
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


def resumed(make: Make, path: Path, hops: list[tuple[int, Any]]) -> dict[str, torch.Tensor]:
    module = make()
    for number, (devices, strategy) in enumerate(hops):
        module, before = make(), path / f"{number}.ckpt"
        last = number == len(hops) - 1
        stop = SaveAndStop(path / f"{number + 1}.ckpt", 1000 if last else 2 * (number + 1))
        options = {"strategy": strategy, "max_epochs": 4, "callbacks": [stop]}
        with quiet():
            ckpt = str(before) if number else None
            trainer(devices, **options).fit(module, digits(), ckpt_path=ckpt, weights_only=True if number else None)
    return weights(module)


@pytest.mark.parametrize("name", mostly_slow(["teacher", "students"], "teacher"))
def test_runs_go_on_under_ddp_and_back(name: str, tmp_path: Path) -> None:
    one = fitted(MODULES[name], strategy=DDP(exact=8), max_epochs=4)
    shapes = [pipeline(exact=8, **options) for _, options in (SHAPES["3"], SHAPES["2x2"], SHAPES["4"])]
    hops = [(2, DDP(timeout=60, exact=8)), (3, shapes[0]), (4, shapes[1]), (1, DDP(exact=8)), (2, shapes[2])]
    assert_same(weights(one), resumed(MODULES[name], tmp_path, hops))
    layouts = [torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (1, 2, 3, 4)]
    for layout in layouts[1:]:
        assert list(layout["state_dict"]) == list(layouts[0]["state_dict"])
        for a, b in zip(layouts[0]["optimizer_states"], layout["optimizer_states"], strict=True):
            assert a["param_groups"] == b["param_groups"]
            assert list(a["state"]) == list(b["state"])
            for i, state in a["state"].items():
                assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in b["state"][i].items()}


def kept(rank: int, folder: Path) -> None:
    """A script that fits and then saves, as each rank of torchrun's runs it."""
    module, made = Conv(), trainer(2, strategy=pipeline())
    with quiet():
        made.fit(module, digits(validation_size=50))
        made.save_checkpoint(folder / "after.ckpt")
    torch.save(module.state_dict(), folder / f"weights{rank}.pt")


def test_a_script_can_save_after_the_fit(tmp_path: Path) -> None:
    for run in launch(kept, tmp_path):
        assert run.wait() == 0, run.output
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    one = fitted(Conv)
    module, made = Conv(), trainer(2, strategy=pipeline(), max_epochs=2)
    with quiet():
        made.fit(module, digits(validation_size=50))
        made.save_checkpoint(tmp_path / "parent.ckpt")
    for state in (saved["state_dict"], *(torch.load(tmp_path / f"weights{n}.pt") for n in range(2))):
        assert list(state) == list(one.state_dict())
        assert_same(state, weights(module))
    assert len(saved["optimizer_states"][0]["state"]) == len(list(one.parameters()))
    assert_same(torch.load(tmp_path / "parent.ckpt", weights_only=True)["state_dict"], weights(module))
