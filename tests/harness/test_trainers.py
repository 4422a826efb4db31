"""Strategies and Trainers from the command line, what ranks that fail leave behind, and strangers' files of weights."""

import os
import shlex
import signal
from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchvision import models

import strategies
from apprentice.errors import BadInput
from apprentice.weights import check_weights
from experiments import kd
from harness import cli
from harness.runs.options import RunOptions
from harness.runs.trainer import trainer_factory
from harness.runs.training_options import Strategies, add_trainer
from lit_modules.nets import Torchvision
from lit_modules.nets.weights import load_weights
from lit_modules.objectives import CrossEntropy
from strategies import DDP
from tests.grids import mostly_slow
from tests.processes import Run
from tests.training import assert_same, net

EARLIER = {
    "ddp": "strategies.ddp.DDP", "fsdp": "strategies.fsdp.FSDP", "hsdp": "strategies.hsdp.HSDP",
    "pipeline": "strategies.pipeline.PipelineStrategy", "ddp_zero1": "strategies.zero1.ZeRO1",
    "param_server": "lab.strategies.param_server.ParamServer",
    "local_sgd": "lab.strategies.local_sgd.LocalSGD", "ddp_ring": "lab.strategies.ddp_ring.DDPRing",
}  # fmt: skip
HERE = __name__


@pytest.fixture(scope="module")
def command() -> cli.Parser:
    parser = cli.Parser("mine.py", "", RunOptions)
    add_trainer(parser, accelerator="cpu", enable_progress_bar=False, logger=False)
    return parser


def chosen(command: cli.Parser, line: str) -> Any:
    return command.parse(shlex.split(line)).trainer.init_args["strategy"]


def trainer(command: cli.Parser, line: str) -> Trainer:
    config = command.parse(shlex.split(line))
    return trainer_factory(config.trainer, config.exact)()


def test_a_run_on_cpus_sees_no_gpu(command: cli.Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    trainer(command, "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


# --trainer.strategy


@pytest.mark.parametrize(("line", "kind", "options"), [
    ("ddp", "DDP", {"timeout": 1800.0, "start_method": "auto"}),
    ("ddp_fork --trainer.strategy.timeout 60", "DDP", {"timeout": 60.0, "start_method": "fork"}),
    ("ddp_fork --trainer.strategy.start_method spawn", "DDP", {"start_method": "spawn"}),
    ("hsdp", "HSDP", {"shard_size": 2}),
    ("hsdp --trainer.strategy.shard_size 4", "HSDP", {"shard_size": 4}),
    ("'{class_path: hsdp, init_args: {shard_size: 3}}'", "HSDP", {"shard_size": 3}),
    ("strategies.HSDP --trainer.strategy.shard_size 3", "HSDP", {"shard_size": 3}),
    ("lightning.pytorch.strategies.DDPStrategy --trainer.strategy.start_method fork", "DDPStrategy",
     {"start_method": "fork"}),
])  # fmt: skip
def test_a_strategy_is_chosen_with_its_options(command: cli.Parser, line: str, kind: str, options: Any) -> None:
    strategy = chosen(command, f"--trainer.strategy {line}")
    assert strategy.name == kind
    assert {name: strategy.init_args[name] for name in options} == options


@pytest.mark.parametrize("name", ["auto", "deepspeed", "fsdp_cpu_offload"])
def test_what_lightning_looks_up_stays_its_name(command: cli.Parser, name: str) -> None:
    assert chosen(command, f"--trainer.strategy {name}") == name


def test_the_same_name_again_keeps_options_and_another_drops_them(command: cli.Parser, tmp_path: Path) -> None:
    strategy = "{class_path: ddp_fork, timeout: 60}"
    (tmp_path / "my.yaml").write_text(f"trainer: {{strategy: {strategy}}}")
    start = f"--config {tmp_path / 'my.yaml'}"
    for line, expected in (("", ("fork", 60)), ("--trainer.strategy ddp_fork", ("fork", 60)),
                           ("--trainer.strategy ddp", ("auto", 1800))):  # fmt: skip
        options = chosen(command, f"{start} {line}").init_args
        assert (options["start_method"], options["timeout"]) == expected
    assert chosen(command, f"{start} --trainer.strategy hsdp").init_args["shard_size"] == 2


def test_options_are_those_that_the_command_line_can_give(command: cli.Parser) -> None:
    family = Strategies(names=strategies.NAMES)

    def options(name: str) -> set[str]:
        return set(family.choose(name).init_args)

    shared = {"process_group_backend", "start_method", "timeout", "init_method"}
    wrapper = {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"}
    assert options("ddp") == options("ddp_zero1") == options("ddp_fp16") == shared | wrapper
    assert options("ddp_powersgd") == shared | wrapper | {"rank", "start_step"}
    assert options("local_sgd") == shared | wrapper | {"period", "warmup_steps"}
    sharded = {"param_dtype", "reduce_dtype", "offload", "activation_checkpointing", "reshard_after_forward", "mesh"}
    assert options("fsdp") == shared | sharded
    assert options("hsdp") == shared | sharded | {"shard_size"}
    own = chosen(command, "--trainer.strategy lightning.pytorch.strategies.FSDPStrategy").init_args
    assert {"device_mesh", "mixed_precision"} <= set(own)


@pytest.mark.parametrize("name", strategies.NAMES)
def test_class_paths_are_those_of_earlier_runs(name: str) -> None:
    choice = Strategies(names=strategies.NAMES).choose(name)
    assert choice.class_path == strategies.NAMES[name][0]
    assert resolve_name(choice.class_path).__name__ == choice.name
    if name in EARLIER:
        assert choice.class_path == EARLIER[name]


def test_help_names_the_strategies_and_the_options_of_the_one_chosen(
    command: cli.Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, shown in (("", ["--trainer.strategy auto"]), ("hsdp", ["strategy hsdp", "strategy.shard_size 2"])):
        with pytest.raises(SystemExit):
            command.parse([*(["--trainer.strategy", line] if line else []), "--help", "all"])
        text = " ".join(capsys.readouterr().out.split())
        names = ", ".join(["auto", *strategies.NAMES])
        for part in (f"trainer.strategy: {names}, or the import path of a class", *shown):
            assert part in text
        assert "cluster_environment" not in text
        assert "--exact null" in text


def test_each_trainer_has_a_strategy_of_its_own(command: cli.Parser) -> None:
    config = command.parse(["--trainer.strategy", "ddp", "--trainer.strategy.timeout", "7"])
    make_trainer = trainer_factory(config.trainer, None)
    first, second = make_trainer(), make_trainer(devices=1, max_epochs=3)
    assert isinstance(first.strategy, DDP)
    assert (first.strategy._timeout, first.strategy.exact) == (timedelta(seconds=7), None)
    assert first.strategy is not second.strategy
    assert second.max_epochs == 3


# --exact


@pytest.mark.parametrize("line", ["", "--trainer.devices 1", "--trainer.strategy ddp_fork --trainer.devices 3"])
def test_exact_goes_to_the_strategy(command: cli.Parser, line: str) -> None:
    strategy = trainer(command, f"--exact 8 {line}").strategy
    assert isinstance(strategy, DDP)
    assert strategy.exact == 8


def test_exact_is_refused_by_a_strategy_that_derives_from_one_that_cannot_hold_it(command: cli.Parser) -> None:
    with pytest.raises(BadInput, match=r"model_parallel; hsdp can't$"):
        trainer(command, "--exact 8 --trainer.strategy strategies.HSDP")


# Ranks that fail


class Dies(CrossEntropy):
    """Kills its rank in the second step."""

    calls = 0

    def forward(self, student: Any, teacher: Any, labels: torch.Tensor) -> Any:
        self.calls += self.training
        if self.calls == 2 and int(os.environ.get("LOCAL_RANK", "0")) == 1:
            self.die()
        return super().forward(student, teacher, labels)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stumbles(Dies):
    """Has a mistake."""

    def die(self) -> None:
        raise KeyError("a mistake of ours")


class Grows(Dies):
    """Wants more memory than there is."""

    def die(self) -> None:
        torch.empty(10**15)


class Refuses(Dies):
    """Finds only then that an option can't be used."""

    def die(self) -> None:
        raise BadInput("batch_size", 64, "another")


ENDS = {
    "Dies": (2, "error: rank 1 was killed by SIGKILL; --out FOLDER --resume true goes on from"),
    "Grows": (2, "error: rank 1 had no memory for 4000000000000000 bytes more; with more --trainer.devices each needs"),
    "Stumbles": (1, "KeyError: 'a mistake of ours'"),
    "Refuses": (2, "error: --data.batch_size 64: expected another"),
}


@pytest.mark.parametrize("kind", mostly_slow(ENDS, "Dies"))
def test_what_a_rank_leaves_behind(kind: str, tmp_path: Path) -> None:
    flags = ["--teacher", "LightNN", "--seeds", "1", "--data.train_size", "150", "--data.batch_size", "64"]
    flags += ["--only", "x", "--variants.x", f"{HERE}.{kind}", "--out", str(tmp_path / "x")]
    flags += ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    run = Run(kd.main, flags, log=tmp_path / "log")
    code, said = ENDS[kind]
    assert run.wait() == code, run.output
    last = run.output.strip().splitlines()[-1]
    assert said in last
    assert ("Traceback" in run.output) == (code == 1), run.output


# Strangers' files of weights


class Wrapped(LightningModule):
    """Someone's module around a net."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.save_hyperparameters({"lr": 0.1, "betas": (0.9, 0.99)})


def lightnings_own(source: nn.Module, path: Path) -> None:
    own = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    own.strategy.connect(Wrapped(source))
    own.save_checkpoint(path)


def leading(prefix: str, source: nn.Module) -> dict[str, Any]:
    return OrderedDict((f"{prefix}{key}", value) for key, value in source.state_dict().items())


def adam(source: nn.Module) -> dict[str, Any]:
    return torch.optim.Adam(source.parameters()).state_dict()


FOREIGN: dict[str, Any] = {
    "bare": lambda s: s.state_dict(),
    "a script's": lambda s: {"epoch": 3, "model": s.state_dict(), "optimizer": adam(s), "args": Namespace(lr=0.1)},
    "ImageNet's": lambda s: {
        "epoch": 3, "arch": "lightnn", "state_dict": leading("module.", s), "best_acc1": np.float64(71.5)},
    "the tutorials'": lambda s: {"epoch": 3, "model_state_dict": s.state_dict(), "optimizer_state_dict": adam(s)},
    "compiled": lambda s: leading("_orig_mod.", s),
    "compiled and parallel": lambda s: leading("module._orig_mod.", s),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*FOREIGN, "Lightning's"])
def test_strangers_files_load(kind: str, tmp_path: Path) -> None:
    source, target, path = net(seed=1), net(seed=2), tmp_path / "w.pt"
    if kind == "Lightning's":
        lightnings_own(source, path)
    else:
        torch.save(FOREIGN[kind](source), path)
    load_weights(target, str(path), "teacher_ckpt")
    assert_same(source.state_dict(), target.state_dict())


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model.", "net.model."])
def test_torchvisions_files_load_into_its_nets(prefix: str, tmp_path: Path) -> None:
    source, target = models.squeezenet1_1(num_classes=10), Torchvision("squeezenet1_1", (3, 64, 64))
    torch.save({"state_dict": leading(prefix, source)}, tmp_path / "w.pt")
    load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")
    assert_same(source.state_dict(), target.model.state_dict())


def test_heads_that_only_training_has_are_left_out(tmp_path: Path) -> None:
    source, target = models.googlenet(num_classes=10, init_weights=False), Torchvision("googlenet", (3, 96, 96))
    torch.save(source.state_dict(), tmp_path / "w.pt")
    load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")
    own = {key: value for key, value in source.state_dict().items() if not key.startswith("aux")}
    assert_same(own, target.model.state_dict())


def test_a_mask_of_the_nets_may_be_infinite_and_weights_may_not(tmp_path: Path) -> None:
    target = nn.BatchNorm1d(2)
    target.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    weights = {key: value.clone() for key, value in target.state_dict().items()}
    check_weights(target.state_dict(), weights, "w.pt", "run")
    weights["running_var"][1] = float("nan")
    with pytest.raises(BadInput, match="expected finite weights; running_var has 1 of 2 that are NaN"):
        check_weights(target.state_dict(), weights, "w.pt", "run")


class Block(nn.Module):
    """A net with a `module` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"module": nn.Linear(2, 2)})


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_only_a_leading_module_is_taken_off(prefix: str, tmp_path: Path) -> None:
    source, target = Block(), Block()
    torch.save(leading(prefix, source), tmp_path / "w.pt")
    load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")
    assert_same(source.state_dict(), target.state_dict())


@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: {"epoch": 3, "model": n}])
def test_a_pickled_module_is_refused_in_one_line(wrap: Any, tmp_path: Path) -> None:
    torch.save(wrap(net()), tmp_path / "w.pt")
    with pytest.raises(BadInput, match="more than a state_dict") as caught:
        load_weights(net(), str(tmp_path / "w.pt"), "teacher_ckpt")
    assert "\n" not in str(caught.value)


def test_weights_are_loaded_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torch.save
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")  # as if written on a GPU
    saved(net(seed=1).state_dict(), tmp_path / "w.pt")
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(tmp_path / "w.pt", weights_only=True)
    load_weights(net(seed=2), str(tmp_path / "w.pt"), "teacher_ckpt")
