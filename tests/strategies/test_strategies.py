"""A strategy changes where tensors live and what is sent, not the result; where it does, it does just that."""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

import strategies
from harness.runs.quiet import quiet
from lab.strategies import DDPFP16, DDPPowerSGD, DDPRing, LocalSGD
from lit_modules.classifier import LitClassifier
from lit_modules.nets import LightNN, ResNet
from strategies import DDP, FSDP, HSDP, DataParallel, ZeRO1
from tests.callbacks import Notes, SaveAndStop
from tests.grids import mostly_slow
from tests.training import (
    MODULES,
    TAGS,
    Outcome,
    assert_agree,
    assert_same,
    classifier,
    digits,
    distillation,
    fit,
    on,
    outcome,
    trainer,
    weights,
)

STEPS = {"max_epochs": -1, "max_steps": 20, "log_every_n_steps": 1, "precision": "64-true"}
sgd = functools.partial(torch.optim.SGD, lr=0.05)
OPTIONS: dict[str, Any] = {
    "plain": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}
CASES = [  # more of ddp: test_invariance.py
    *((place, "students", "accumulated and clipped") for place in ("ddp 3", "ddp_zero1 2")),
    *(("ddp_zero1 2", run, "plain") for run in ("teacher", "resnet8")),
    *((place, "students", "plain") for place in ("ddp_zero1 3", "ddp_zero1 8")),
]  # fmt: skip


def trained(run: str, place: str, folder: Path, **options: Any) -> Outcome:
    """After 20 steps in batches of 37, 37, 37 and 1, in which all ranks but one have no row."""
    return outcome(MODULES[run](), digits(train_size=112), folder, [TAGS[run]], **STEPS | on(place) | options)


@functools.cache
def alone(run: str, options: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return trained(run, "auto 1", Path(folder), **OPTIONS[options])


@pytest.mark.parametrize("strategy", mostly_slow([DDP, DDPRing, ZeRO1, FSDP], FSDP))
def test_nets_may_be_in_channels_last(strategy: Callable[..., DataParallel]) -> None:
    module, last = classifier(LightNN), classifier(LightNN).to(memory_format=torch.channels_last)
    settings = STEPS | {"max_steps": 4, "logger": False}
    fit(module, digits(train_size=112), 1, **settings)
    fit(last, digits(train_size=112), 2, strategy=strategy(timeout=60), **settings)
    assert_same(weights(module), weights(last), atol=1e-9)
    assert {p.is_contiguous(memory_format=torch.channels_last) for p in last.parameters() if p.dim() == 4} == {True}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "run", "options"), CASES)
def test_float64_agrees_with_one_process(place: str, run: str, options: str, tmp_path: Path) -> None:
    assert_agree(alone(run, options), trained(run, place, tmp_path, **OPTIONS[options]))
    assert len(alone(run, options)[0]) == 20


def norm(_trainer: Any, module: Any) -> float:
    return sum(p.detach().double().square().sum().item() for p in module.parameters() if p.requires_grad)


def state_bytes(trainer: Any, _module: Any) -> int:
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return sum(x.nbytes for state in states for x in state.values() if isinstance(x, torch.Tensor) and x.dim())


@pytest.mark.parametrize("devices", mostly_slow([2, 3], 3))
def test_zero1_cuts_the_optimizers_state(devices: int, tmp_path: Path) -> None:
    parameters = 8 * sum(p.numel() for p in ResNet(depth=20).parameters())  # Adam has two float32 numbers for each
    found = {}
    for name in ("ddp", "ddp_zero1"):
        told = Notes(tmp_path / name, state_bytes, "on_train_batch_end")
        module = LitClassifier(ResNet(depth=20, input_shape=(1, 8, 8)))
        data = digits(train_size=16, batch_size=8)
        fit(module, data, **on(f"{name} {devices}"), callbacks=[told], max_epochs=1)
        found[name] = [steps[-1] for steps in told.of_ranks()]
    whole = found["ddp"][0]
    assert found["ddp"] == [whole] * devices
    assert whole == pytest.approx(parameters, rel=0.01)  # but for the first layer, which sees one channel of three
    assert sum(found["ddp_zero1"]) == whole
    assert max(found["ddp_zero1"]) <= 1.1 * whole / devices


@pytest.mark.slow
def test_local_sgd_of_every_step_is_data_parallel_sgd() -> None:
    def ended(strategy: DataParallel) -> dict[str, torch.Tensor]:
        module = distillation(optimizer=sgd)
        return weights(fit(module, digits(train_size=112), 3, strategy=strategy, **STEPS))

    right = ended(DDP(timeout=60))
    assert_same(ended(LocalSGD(timeout=60, period=1)), right, atol=1e-9)
    assert_same(ended(LocalSGD(timeout=60, period=4, warmup_steps=20)), right, atol=1e-9)
    other = ended(LocalSGD(timeout=60, period=4))
    assert max((other[key] - right[key]).abs().max() for key in right) > 1e-6


@pytest.mark.parametrize("period", [1, 4])
def test_local_sgds_ranks_differ_until_they_are_averaged(period: int, tmp_path: Path) -> None:
    told = Notes(tmp_path / "norms", norm, "on_train_batch_end")
    strategy = LocalSGD(timeout=60, period=period)
    data = digits(train_size=101, validation_size=20)  # validated after every epoch of 3 steps
    fit(classifier(), data, 3, strategy=strategy, callbacks=[told], **STEPS | {"max_steps": 10})
    equal = [len(set(norms)) == 1 for norms in zip(*told.of_ranks(), strict=True)]
    assert equal == [(step + 1) % period == 0 for step in range(10)]


def test_local_sgd_is_saved_as_its_average(tmp_path: Path) -> None:
    """Saved in mid-period and gone on with, all ranks start from one average, of the moments too."""
    path, told = tmp_path / "saved.ckpt", Notes(tmp_path / "norms", norm, "on_train_batch_end")
    saving = {"callbacks": [SaveAndStop(path, 6)], "strategy": LocalSGD(timeout=60)}
    ended = fit(classifier(), digits(), 2, **STEPS | saving)  # at step 7, its ranks averaged
    saved = torch.load(path, weights_only=True)
    with quiet():
        again = trainer(2, strategy=LocalSGD(timeout=60), callbacks=[told], **STEPS | {"max_steps": 12})
        again.fit(classifier(), digits(), ckpt_path=path, weights_only=True)
    equal = [len(set(norms)) == 1 for norms in zip(*told.of_ranks(), strict=True)]
    assert equal == [False, True, False, False, False, True]
    step = max(float((weights(ended)[key] - saved["state_dict"][key]).abs().max()) for key in weights(ended))
    assert 0 < step < 0.01  # one step of Adam


@pytest.mark.parametrize("strategy", [DDPFP16, DDPPowerSGD])
def test_compressed_gradients_are_compressed_on_cpu_too(strategy: Callable[..., DataParallel]) -> None:
    right = weights(fit(classifier(), digits(), 2, **STEPS))
    ended = weights(fit(classifier(), digits(), 2, strategy=strategy(timeout=60), **STEPS))
    difference = max(float((ended[key] - right[key]).abs().max()) for key in right)
    assert 1e-6 < difference < 0.1
    if strategy is DDPPowerSGD:  # gradients travel whole at the start
        options = STEPS | {"max_steps": 6}
        start = weights(fit(classifier(), digits(), 2, strategy=DDPPowerSGD(timeout=60), **options))
        assert_same(start, weights(fit(classifier(), digits(), 2, **options)), atol=1e-9)


CHAIN: list[tuple[Callable[..., Any], dict[str, Any], int]] = [
    (ZeRO1, {}, 3), (DDP, {}, 2), (ZeRO1, {"exact": 8}, 2), (DDP, {}, 1), (ZeRO1, {}, 2),
]  # fmt: skip


def test_a_checkpoint_goes_on_under_any_strategy_on_any_number(tmp_path: Path) -> None:
    right = weights(fit(distillation(["ce", "hint"]), digits(), max_epochs=-1, max_steps=20, precision="64-true"))
    path, module = tmp_path / "run.ckpt", distillation(["ce", "hint"])
    for part, (strategy, chosen, devices) in enumerate(CHAIN, 1):
        module = distillation(["ce", "hint"])
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        options = STEPS | {"callbacks": [SaveAndStop(path, 4 * part)], "strategy": strategy(timeout=60, **chosen)}
        with quiet():
            trainer(devices, **options).fit(module, digits(), **resumed)
        if part < len(CHAIN):
            states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
            assert len(states) == sum(p.requires_grad for p in module.parameters())
    assert_same(weights(module), right, atol=1e-9)


@pytest.fixture
def registered() -> Iterator[None]:
    before, lightnings = dict(StrategyRegistry), list(FSDPStrategy._registered_strategies)
    strategies.register()
    yield
    StrategyRegistry.clear()
    StrategyRegistry.update(before)
    FSDPStrategy._registered_strategies[:] = lightnings


@pytest.mark.usefixtures("registered")
def test_names_stand_in_lightnings_registry() -> None:
    assert type(trainer(2, strategy="auto").strategy) is DDP
    for name, (path, options) in strategies.NAMES.items():
        made = trainer(2, strategy=name).strategy
        assert type(made) is resolve_name(path)
        assert all(getattr(made, key) == value for key, value in options.items())
    for name, start_method in {
        "ddp_find_unused_parameters_false": "popen",
        "ddp_fork_find_unused_parameters_true": "fork",
    }.items():
        made = trainer(2, strategy=name).strategy
        assert (type(made), made.start_method) == (DDP, start_method)
        assert made._ddp_kwargs["find_unused_parameters"] is name.endswith("true")
    with pytest.raises(ValueError, match="requires a GPU accelerator"):  # Lightning's own
        trainer(2, strategy="fsdp_cpu_offload")


HOOKED: dict[str, dict[str, Any]] = {
    "hook": {"ddp_comm_hook": fp16_compress_hook},
    "wrapper": {"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": fp16_compress_wrapper},
}


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize("name", HOOKED)
def test_ddpstrategys_hooks_are_used(name: str) -> None:
    options = STEPS | {"max_steps": 3}
    right = weights(fit(classifier(), digits(), 2, strategy=DDPFP16(timeout=60), **options))
    others: dict[str, Any] = {"broadcast_buffers": False, "init_sync": True, "bucket_cap_mb": None}
    mine = DDP(timeout=timedelta(minutes=1), **HOOKED[name], **others)
    assert_same(weights(fit(classifier(), digits(), 2, strategy=mine, **options)), right)


@pytest.mark.filterwarnings("ignore:When period is 1")
def test_ddpstrategys_model_averaging_is_used() -> None:
    def ended(strategy: DataParallel) -> dict[str, torch.Tensor]:
        options = STEPS | {"max_steps": 4}
        return weights(fit(distillation(["ce"], optimizer=sgd), digits(), 2, strategy=strategy, **options))

    state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
    hook: dict[str, Any] = {"ddp_comm_state": state, "ddp_comm_hook": post_localSGD_hook, "model_averaging_period": 1}
    assert_same(ended(DDP(timeout=None, **hook)), ended(DDP(timeout=60)), atol=1e-9)  # plain SGD, averaged every step


def test_ddpstrategys_plugins_are_used() -> None:
    environment, writes = LightningEnvironment(), TorchCheckpointIO()
    strategy = DDP(
        parallel_devices=[torch.device("cpu")] * 3, cluster_environment=environment,
        checkpoint_io=writes, precision_plugin=DoublePrecision(),
    )  # fmt: skip
    made = Trainer(strategy=strategy, logger=False, enable_progress_bar=False)
    assert made.world_size == 3
    assert made.strategy.cluster_environment is environment  # type: ignore[attr-defined]
    assert made.strategy.checkpoint_io is writes
    assert made.precision == "64-true"
    assert isinstance(Trainer(devices=2, strategy=DDP(accelerator=CPUAccelerator())).accelerator, CPUAccelerator)


UNKNOWN: list[tuple[Callable[..., Any], str]] = [
    *((resolve_name(path), "x") for path, _ in strategies.NAMES.values()),
    (FSDP, "ddp_comm_hook"), (DDPFP16, "ddp_comm_hook"), (DDPRing, "process_group_backend"), (DDP, "device_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name"), UNKNOWN)
def test_an_unknown_argument_names_the_class_that_was_called(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(**{name: 1})
    assert str(caught.value) == f"{make.__name__}(...) got an unexpected argument {name!r}"


def test_exact_can_be_set_until_the_trainer_is_made() -> None:
    strategy = DDP(timeout=60)
    strategy.exact = 4
    fit(module := classifier(), digits(), 2, strategy=strategy)
    fit(right := classifier(), digits(), 2, strategy=DDP(timeout=60, exact=4))
    assert_same(weights(module), weights(right), atol=0)
    trainer(1, strategy=(one := DDP(exact=4)))
    with pytest.raises(ValueError, match=r"^exact None: expected a number that is set before the Trainer is made$"):
        one.exact = None
    with pytest.raises(ValueError, match=r"^exact 2: expected a number that is set before the Trainer is made$"):
        strategy.exact = 2
    with pytest.raises(AttributeError):
        FSDP().exact = 2


def test_ranks_are_forked_where_that_is_safe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def launcher() -> str:
        return type(trainer(2, strategy=DDP()).strategy.launcher).__name__

    assert launcher() == "ForkLauncher"
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert launcher() == "ScriptLauncher"
    assert "CUDA is in use in this process: ranks are started as sub-processes" in caplog.text
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"}.items():
            patch.setitem(os.environ, name, value)
        patch.setitem(os.environ, "LOCAL_WORLD_SIZE", "2")
        assert launcher() == "ScriptLauncher"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDP(timeout=0), "timeout 0: expected seconds, above 0"),
        (lambda: DDP(timeout=timedelta(0)), "timeout 0:00:00: expected seconds, above 0"),
        (lambda: DDP(exact=0), "exact 0: expected a number of shards, 1 to 4096"),
        (lambda: DDP(exact=4097), "exact 4097: expected a number of shards, 1 to 4096"),
        (lambda: trainer(2, strategy=FSDP(offload=True)), "offload True: expected False"),
        (lambda: FSDP(param_dtype="bf17"), "param_dtype bf17: expected bf16 or fp16"),
        (lambda: trainer(4, strategy=HSDP(shard_size=0)), "shard_size 0: expected a number that divides the 4 devices"),
        (lambda: trainer(4, strategy=HSDP(shard_size=3)), "shard_size 3: expected a number that divides the 4 devices"),
        (lambda: trainer(1, strategy=HSDP()), "shard_size 2: expected a number that divides the 1 devices"),
        (lambda: HSDP(mesh={"tensor": 2}), "not allowed, as shard_size makes the groups"),
        (lambda: trainer(2, strategy=DDP(exact=8, ddp_comm_hook=fp16_compress_hook)), "exact 8: expected no ddp_comm_"),
        (lambda: LocalSGD(period=0), "period 0: expected at least 1"),
        (lambda: LocalSGD(warmup_steps=-1), "warmup_steps -1: expected 0 or more"),
        (lambda: DDPPowerSGD(rank=0), "rank 0: expected at least 1"),
        (lambda: DDPPowerSGD(start_step=1), "start_step 1: expected at least 2"),
    ],
)
def test_options_that_can_not_work_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
