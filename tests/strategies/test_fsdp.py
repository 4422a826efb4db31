"""Sharded over any number of ranks, training ends where one process ends, with a part of the state on each."""

import copy
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from apprentice.keyed import Dropout
from datamodules import Digits
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, ResNet
from lit_modules.objectives import CrossEntropy
from strategies import FSDP, HSDP
from tests.grids import mostly_slow
from tests.lit_modules.test_distillation import Poisoned
from tests.processes import launch
from tests.training import (
    SHAPE,
    LinesLogger,
    Outcome,
    assert_agree,
    assert_same,
    classifier,
    digits,
    distil,
    distillation,
    fit,
    net,
    outcome,
    trainer,
    weights,
)

DOUBLE: dict[str, Any] = {"precision": "64-true", "max_epochs": -1}
CLOSE = 1e-9  # in float64, where sums in another order differ by 1e-14


class Blocks(nn.Module):
    """Layers with keyed noise, and a weight that two of its modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU(), Dropout(0.3, i)) for i in range(3))
        self.blocks.append(nn.Linear(64, 12))
        self.blocks[3].weight = self.first.weight
        self.last = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1)
        y = self.first(x)
        for block in self.blocks[:3]:
            y = y + block(y)
        return self.last(y + self.blocks[3](x))


class Foreign(LightningModule):
    """Knows nothing of this suite but its batches; Lightning clips its gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({"body": nn.Sequential(nn.Linear(64, 9), nn.Tanh()), "head": nn.Linear(9, 10)})

    def losses(self, batch: Any) -> torch.Tensor:
        logits = self.parts["head"](self.parts["body"](batch.inputs.flatten(1)))
        return F.cross_entropy(logits, batch.labels, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = batch.mean(self.losses(batch))
        self.log("train/loss", loss, sync_dist=True)
        return loss

    @torch.inference_mode()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses(batch)

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.parameters(), lr=1e-3)


def one_fails() -> Distillation:
    return distil({"bad": Poisoned(4), "ce": CrossEntropy()})


NO_ROWS = {"batch_size": 3, "train_size": 10}
CASES: dict[str, tuple[Callable[[], LightningModule], dict[str, Any]]] = {
    "light": (classifier, {}),
    "deep": (lambda: classifier(DeepNN), {}),
    "resnet8": (lambda: classifier(ResNet, depth=8), {}),
    "blocks": (lambda: LitClassifier(net(lambda **_: Blocks())), {}),
    "students": (distillation, {}),
    "teacher not stored": (lambda: distillation(["hint"], teacher_cache_mb=0), {}),
    "one fails": (one_fails, {}),
    "foreign": (Foreign, {}),
    "ranks without rows": (lambda: classifier(ResNet, depth=8), NO_ROWS),
}
RUNS = {"students": "hint/", "teacher not stored": "hint/", "one fails": "ce/"}
CLIP = {"gradient_clip_val": 0.05}
CLIP_VALUES = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
ACCUMULATE = {"accumulate_grad_batches": 2}


def small(**kwargs: Any) -> Digits:
    """Batches of 11, 11 and 7: no number of ranks divides them, and eight leave one without a row."""
    return digits(**{"batch_size": 11, "train_size": 29, "validation_size": 10} | kwargs)


def trained(name: str, folder: Path, devices: int = 1, **options: Any) -> Outcome:
    """Losses and final weights of 20 steps; one validation comes first."""
    make, data = CASES[name]
    steps = DOUBLE | {"max_steps": 20, "num_sanity_val_steps": 1, "check_val_every_n_epoch": 99}
    return outcome(make(), small(**data), folder, [f"{RUNS.get(name, '')}train/loss"], devices, **steps | options)


SHARDED: list[tuple[str, int, type[FSDP], dict[str, Any], dict[str, Any]]] = [
    ("light", 1, FSDP, {}, {}),
    ("light", 3, FSDP, {"reshard_after_forward": False}, CLIP),
    ("light", 4, HSDP, {"shard_size": 2}, CLIP | ACCUMULATE),
    ("foreign", 8, FSDP, {}, CLIP),
    ("deep", 2, FSDP, {}, CLIP),
    ("resnet8", 2, FSDP, {}, CLIP_VALUES),
    ("resnet8", 2, FSDP, {"activation_checkpointing": True}, ACCUMULATE),
    ("blocks", 3, FSDP, {"activation_checkpointing": True}, {}),
    ("students", 2, FSDP, {}, {}),
    ("teacher not stored", 2, FSDP, {}, CLIP | ACCUMULATE),
    ("one fails", 2, FSDP, {}, {}),
    ("ranks without rows", 3, FSDP, {}, {}),
]


@pytest.mark.parametrize("case", mostly_slow(range(len(SHARDED)), 7), ids=lambda case: SHARDED[case][0])
def test_training_is_that_of_one_process(case: int, tmp_path: Path) -> None:
    name, devices, make, sharding, options = SHARDED[case]
    one = trained(name, tmp_path, **options)
    assert len(one[0]) >= 20
    assert_agree(one, trained(name, tmp_path, devices, strategy=make(timeout=60, **sharding), **options), CLOSE)


class Watch(Callback):
    """Fails unless the middle block is computed so often a step, with its neighbour's weight whole or not."""

    def __init__(self, times: int, whole: bool) -> None:
        self.times, self.whole, self.calls = times, whole, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.blocks = pl_module.net.blocks
        self.blocks[1][1].register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 1:  # in forward
            assert self.whole != isinstance(self.blocks[0][0].weight, DTensor)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averaged = {p.grad is not None for p in pl_module.parameters()}
        assert averaged == {not trainer.fit_loop._should_accumulate()}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        assert self.calls == self.times
        self.calls = 0


@pytest.mark.parametrize(
    ("sharding", "times", "whole"),
    [({}, 1, False), ({"reshard_after_forward": False}, 1, True), ({"activation_checkpointing": True}, 2, False)],
)
def test_layers_are_gathered_computed_and_averaged_as_asked(sharding: dict[str, Any], times: int, whole: bool) -> None:
    options = {"callbacks": [Watch(times, whole)], "max_epochs": 2, **ACCUMULATE}
    fit(CASES["blocks"][0](), small(validation_size=0), 1, strategy=FSDP(timeout=60, **sharding), **options)


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory in which tensors, or a rank's parts of them, lie."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


class Bytes(Callback):
    """Notes what a rank holds before its last step: of what is sharded, and of the parameters as they were before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.before = list(pl_module.parameters())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        if moments:
            parameters = list(pl_module.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            found = {"parameters": parameters, "gradients": gradients, "moments": moments, "before": self.before}
            sizes = {key: stored(tensors) for key, tensors in found.items()}
            (self.path / f"{trainer.global_rank}.json").write_text(json.dumps(sizes))


class EverySecond(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step % 2 == 0:
            trainer.save_checkpoint(self.path / str(trainer.global_step))


def saved(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(path, weights_only=True)
    found = dict(checkpoint["state_dict"])
    for number, state in checkpoint["optimizer_states"][0]["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    assert all(type(value) is torch.Tensor for value in found.values())
    return found


@pytest.mark.parametrize(
    ("devices", "make", "parts", "resumed"),
    mostly_slow([(2, FSDP, 2, True), (3, FSDP, 3, False), (4, HSDP, 2, False)], (2, FSDP, 2, True)),
)
def test_a_rank_holds_its_part(devices: int, make: type[FSDP], parts: int, resumed: bool, tmp_path: Path) -> None:
    module, start = distillation(["hint"], teacher_cache_mb=0).double(), {}
    if resumed:
        fit(module, small(), callbacks=[EverySecond(tmp_path)], **DOUBLE, max_steps=3)
        start = {"ckpt_path": tmp_path / "2", "weights_only": True}
    with quiet():
        fitting = trainer(devices, strategy=make(timeout=60), callbacks=[Bytes(tmp_path)], **DOUBLE, max_steps=3)
        fitting.fit(module, small(), **start)
    frozen = 8 * sum(p.numel() for p in module.teacher.parameters())
    trained = 8 * sum(p.numel() for p in module.students.parameters())
    whole = {"parameters": frozen + trained, "gradients": trained, "moments": 2 * trained}
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(devices)]
    for key, total in whole.items():
        assert max(rank[key] for rank in ranks) == pytest.approx(total / parts, rel=0.1), key
        assert sum(rank[key] for rank in ranks) >= total
    assert all(rank["before"] == 0 for rank in ranks)


def goes_on(make: Callable[[], LightningModule], stages: Sequence[tuple[Any, int]], path: Path) -> None:
    """A fit that each strategy in turn continues has the states of one on a single device, as loaded and two steps on.

    `stages` are what makes a strategy, and its devices; modules are float64, as a single device loads before it
    converts, which would round.
    """
    fit(make(), small(), callbacks=[EverySecond(path)], **DOUBLE, max_steps=13)
    resumed: dict[str, Any] = {}
    for stage, (strategy, devices) in enumerate(stages, 1):
        own = path / f"stage {stage}"
        options = DOUBLE | {"strategy": strategy(), "callbacks": [EverySecond(own)], "max_steps": 2 * stage + 1}
        with quiet():
            trainer(devices, **options).fit(make(), small(), **resumed)
        for step in (2 * stage - 2, 2 * stage):
            assert_same(saved(path / str(step)), saved(own / str(step)), atol=CLOSE)
        resumed = {"ckpt_path": own / str(2 * stage), "weights_only": True}


def attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: (type(m), {key: len(v) if isinstance(v, dict) else None for key, v in vars(m).items()})
        for name, m in module.named_modules()
    }


def whole_at_the_end(rank: int, path: Path) -> None:
    module = classifier(ResNet, depth=8) if rank == 0 else LitClassifier(net(ResNet, seed=5, depth=8))
    parameters, shape = dict(module.net.named_parameters()), attributes(module.net)
    strides = {name: p.stride() for name, p in parameters.items()}
    for steps, start in ((3, {}), (6, {"ckpt_path": path / "2", "weights_only": True})):
        module.float()  # the checkpoint's precision is kept all the same
        with quiet():
            strategy = FSDP(timeout=60, activation_checkpointing=True)
            trainer(2, strategy=strategy, callbacks=[EverySecond(path)], **DOUBLE, max_steps=steps).fit(
                module, small(), **start
            )
        assert attributes(module.net) == shape
        assert all(parameters[name] is p for name, p in module.net.named_parameters())
        assert strides == {name: p.stride() for name, p in parameters.items()}
    with quiet():
        scores = trainer(2, strategy=FSDP(timeout=60), precision="64-true").test(module, small(), verbose=False)[0]
    copied = copy.deepcopy(module.net)
    copied(torch.zeros(2, *SHAPE, dtype=torch.float64)).sum().backward()
    torch.save({"scores": scores, "weights": weights(module.net)}, path / str(rank))


def test_under_a_launcher_each_rank_has_the_whole_module_at_the_end(tmp_path: Path) -> None:
    ranks = launch(whole_at_the_end, tmp_path)
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    module = fit(classifier(ResNet, depth=8), small(), **DOUBLE, max_steps=6)
    with quiet():
        scores = trainer(precision="64-true").test(module, small(), verbose=False)[0]
    for rank in range(2):
        found = torch.load(tmp_path / str(rank), weights_only=True)
        assert_same(weights(module.net), found["weights"], atol=CLOSE)
        assert found["scores"] == pytest.approx(scores, abs=CLOSE)


class Fails(Callback):
    """One rank ends in the middle of training, while the other is busy."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1:
            raise ArithmeticError("one rank only")
        time.sleep(60)


def one_rank_fails(_rank: int, _path: Path) -> None:
    fit(Foreign(), small(), 2, strategy=FSDP(timeout=60), callbacks=[Fails()], max_steps=2, limit_val_batches=0)


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path: Path) -> None:
    other, failing = launch(one_rank_fails, tmp_path)
    try:
        assert failing.wait(30) == 1
        assert failing.output.strip().endswith("ArithmeticError: one rank only")
        assert other.process.is_alive()
    finally:
        other.process.kill()
        other.process.join()


class LeftOut(LitClassifier):
    def __init__(self) -> None:
        super().__init__(net())
        self.scale = nn.Parameter(torch.ones(1))


class Tied(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(64, 9)
        self.twin.weight = self.parts["body"][0].weight


@pytest.mark.parametrize(
    ("make", "expected"),
    [(LeftOut, "scale can't be sharded: expected a trainable parameter inside a child that is called"),
     (Tied, r"0.weight of Sequential can't be sharded: expected a parameter of one module; another")],
)  # fmt: skip
def test_a_parameter_that_would_drift_is_named(make: type[LightningModule], expected: str) -> None:
    with pytest.raises(ProcessRaisedException, match=expected):
        fit(make(), digits(), 2, strategy=FSDP(timeout=60), max_steps=1, limit_val_batches=0)


class Rounded(LitClassifier):
    """Fails unless its net computes in one dtype, its loss in float32, and its gradients are averaged in another."""

    def __init__(self, expected: torch.dtype, averaged: torch.dtype) -> None:
        super().__init__(net(ResNet, depth=8))
        self.expected, self.averaged = expected, averaged

    def on_fit_start(self) -> None:
        self.net.stage2.register_forward_hook(self.check)

    def check(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        assert output.dtype == self.expected

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images)
        assert logits.dtype == (torch.float32 if self.trainer.precision == "32-true" else torch.bfloat16)
        return logits

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradient = self.net.stage2[0].conv1.weight.grad.to_local()
        for dtype in (torch.bfloat16, torch.float16):
            rounded = torch.equal(gradient, gradient.to(dtype).to(gradient.dtype))
            assert rounded == (dtype == self.averaged) or self.averaged not in {dtype, torch.float32}


@pytest.mark.parametrize(
    ("sharding", "precision", "tolerance"),
    [pytest.param({}, "bf16-mixed", 0.03, marks=pytest.mark.slow),
     pytest.param({"param_dtype": "bf16", "reduce_dtype": "bf16"}, "32-true", 0.05, marks=pytest.mark.slow),
     pytest.param({"param_dtype": "fp16", "activation_checkpointing": True}, "32-true", 0.02, marks=pytest.mark.slow),
     ({"reduce_dtype": "fp16"}, "32-true", 0.02)],
)  # fmt: skip
def test_half_precision_stays_near(sharding: dict[str, Any], precision: Any, tolerance: float, tmp_path: Path) -> None:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}
    dtype = torch.bfloat16 if precision == "bf16-mixed" else names[sharding.get("param_dtype")]
    averaged = names[sharding.get("reduce_dtype")]
    curves = []
    for devices, strategy, make in (
        (1, "auto", lambda: classifier(ResNet, depth=8)),
        (2, FSDP(timeout=60, **sharding), lambda: Rounded(dtype, averaged)),
    ):
        logger = LinesLogger(tmp_path / str(devices))
        options = {"precision": "32-true" if devices == 1 else precision, "max_epochs": 3, "logger": logger}
        module = fit(make(), digits(validation_size=10), devices, strategy=strategy, log_every_n_steps=1, **options)
        assert all(p.dtype == torch.float32 for p in module.parameters())
        curves.append(logger.values("train/loss"))
    assert len(curves[0]) == 9
    assert curves[1] == pytest.approx(curves[0], abs=tolerance, rel=0)
    assert curves[1] != pytest.approx(curves[0], abs=1e-6, rel=0)
