"""The command line: what parses, what it becomes, how it merges, resumes and refuses."""

import errno
import pickle
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer, callbacks
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import datamodules
from apprentice.errors import BadInput
from datamodules.transforms import Transforms
from experiments import kd as experiment
from harness import cli
from harness.cli.classes import Classes
from harness.cli.sources import flat
from harness.runs.arm_names import NAMES, pick
from harness.runs.options import OneSeedOptions, RunOptions
from harness.runs.training_options import add_optimizer, add_trainer
from harness.studies.metrics import MetricClasses
from lit_modules import nets, objectives
from strategies.base.rendezvous import RankTimeoutError
from strategies.exact.training import NotFiniteError
from tests import freeze

IMAGES = {"input_shape": (1, 8, 8), "num_classes": 10}


@pytest.fixture(scope="module")
def kd():
    return experiment.parser()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A stranger's package in the working directory, which is not on the path."""
    packages = yaml.safe_load((freeze.FOLDER / "wrong_inputs.yaml").read_text())["files"]
    freeze.set_up(tmp_path, {"files": "mypackage"}, packages)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mypackage"]:
        del sys.modules[name]


def parse(parser, line):
    return parser.parse(shlex.split(line))


def save(parser, config, path):
    path.write_text(parser.dump(config, of_run=True))


def refused(parser, line):
    """What is said about a line that can't be used."""
    with pytest.raises(BadInput) as caught:
        parse(parser, line)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What parses; tests/frozen/print_config.yaml has the defaults


LINES = {
    "--trainer.devices 8 --trainer.precision 64-true": {"trainer.devices": 8, "trainer.precision": "64-true"},
    "--data MNIST --data.root X --data.train_size 2000": {"data.root": "X", "data.train_size": 2000, "data": "MNIST"},
    "--data ImageFolder --data.root DIR": {"data": "ImageFolder"},
    "--data CIFAR10 --seeds [42] --data.validation_size 0": {"seeds": [42], "data.validation_size": 0},
    "--only ce kd --variants.kd.temperature 4 --out runs/t4": {"only": ["ce", "kd"], "out": "runs/t4"},
    "--only [ce,kd]": {"only": ["ce", "kd"]},
    "--only ce": {"only": ["ce"]},
    "--variants.t8 Hinton --variants.t8.temperature 8": {"variants.t8": "Hinton", "variants.t8.temperature": 8.0},
    "--variants.t8.temperature 8 --variants.t8 Hinton": {"variants.t8.temperature": 8.0, "variants.t8": "Hinton"},
    "--variants.kd=Cosine --variants.kd.init_args.cosine_weight=1": {"variants.kd.cosine_weight": 1.0},
    "--teacher ResNet --teacher.depth 110 --student ResNet": {"teacher.depth": 110, "student.depth": 20},
    "--optimizer SGD --optimizer.lr 0.1 --scheduler MultiStepLR --scheduler.milestones [100,150]": {
        "optimizer": "SGD", "optimizer.lr": 0.1, "scheduler.milestones": [100, 150], "scheduler.gamma": 0.1},
    "--scheduler MultiStepLR --scheduler.milestones 100 150": {"scheduler.milestones": [100, 150]},
    "--scheduler null --teacher_ckpt PATH": {"scheduler": None, "teacher_ckpt": "PATH"},
    "--optimizer torch.optim.AdamW": {"optimizer": "AdamW", "optimizer.weight_decay": 0.01},  # not Adam's 0
    "--optimizer.betas [0.8,0.9] --optimizer.weight_decay 1e-4": {"optimizer.betas": [0.8, 0.9], "optimizer.lr": 3e-3},
    "--recipe null --optimizer.betas [0.8,0.9]": {"optimizer.betas": [0.8, 0.9], "optimizer.lr": 1e-3},
    "--variants.hint null --variants.cosine Cosine": {"variants.hint": None, "variants.cosine": "Cosine"},
    "--student Torchvision --student.name resnet18": {"student.name": "resnet18"},
    "--variants '{kd: Cosine}'": {"variants.kd": "Cosine"},
    "--variants.kd '{temperature: 8}'": {"variants.kd": "Hinton", "variants.kd.temperature": 8.0},
    "--data '{train_size: 100}' --optimizer '{lr: 0.5}'": {
        "data": "Digits", "data.train_size": 100, "optimizer": "Adam", "optimizer.lr": 0.5},
    "--data.class_path MNIST --data.init_args.train_size 100": {"data": "MNIST", "data.train_size": 100},
    "--seeds 3": {"seeds": [0, 1, 2]},
    "--seeds 5 7": {"seeds": [5, 7]},
    "--resume true --out nowhere --data Digits": {"resume": True},
    "--trainer.logger False --seeds 1": {"trainer.logger": False},
    "--trainer.logger false --trainer.callbacks LearningRateMonitor": {
        "trainer.logger": False, "trainer.callbacks": "LearningRateMonitor"},
    "--trainer.callbacks [LearningRateMonitor] --trainer.callbacks.0.logging_interval step": {
        "trainer.callbacks.0.logging_interval": "step"},
    "--trainer.max_time 00:00:01:00 --trainer.limit_train_batches 0.5": {"trainer.limit_train_batches": 0.5},
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES.items(), ids=list(LINES))
def test_lines(kd, line, expected):
    settings = dict(flat(kd.as_dict(parse(kd, line))))
    found = {flag: settings[flag] for flag in expected}
    short = {flag: value.rpartition(".")[2] if isinstance(value, str) else value for flag, value in found.items()}
    assert short == expected


def test_a_path_at_home_is_found_where_a_shell_leaves_it(kd, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse(kd, "--out=~/x --teacher_ckpt=~/a~/t.pt --teacher Ensemble --teacher.members [~/a,~/b]")
    assert (config.out, config.teacher_ckpt) == (f"{tmp_path}/x", f"{tmp_path}/a~/t.pt")
    assert config.teacher.init_args["members"] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    text = "out: ~/y\ntrainer: {max_epochs: 3}\nteacher: {class_path: Ensemble, members: [~/c]}"
    write(tmp_path / "config.yaml", text)
    config = parse(kd, "--config=~/config.yaml")
    assert (config.out, config.teacher.init_args["members"]) == (f"{tmp_path}/y", [f"{tmp_path}/c"])
    assert config.trainer.init_args["max_epochs"] == 3


@pytest.mark.parametrize("option", ["limit_train_batches", "limit_val_batches", "limit_test_batches"])
def test_one_batch_is_a_count_and_one_of_all_a_fraction(kd, tmp_path, option):
    for given in ("1", "7", "0.5", "1.0"):
        config = parse(kd, f"--trainer.{option} {given}")
        save(kd, config, tmp_path / "config.yaml")
        again = [parse(kd, f"--out {tmp_path} --resume true"), parse(kd, f"--config {tmp_path}/config.yaml")]
        assert {str(each.trainer.init_args[option]) for each in (config, *again)} == {given}
    message = refused(kd, f"--trainer.{option} 1 --out {tmp_path} --resume true")
    assert message.startswith(f"trainer.{option} 1: expected 1.0, as the run")


@pytest.mark.parametrize("objectives", [
    '\'[{"class_path": "Hinton", "init_args": {"temperature": 8}}, {"class_path": "Cosine"}]\'',
    "[Hinton,Cosine] --variants.both.objectives.0.temperature 8",
    "Hinton Cosine --variants.both.objectives.0.temperature 8",
    "'[{class_path: Hinton, temperature: 8}, lit_modules.objectives.Cosine]'",
])  # fmt: skip
def test_a_sum_of_objectives(kd, objectives):
    config = parse(kd, f"--variants.both Sum --variants.both.objectives {objectives} --variants.both.weights [1,2]")
    both = cli.build(config.variants["both"], "variants.both")
    assert [type(part).__name__ for part in both.objectives] == ["Hinton", "Cosine"]
    assert (both.objectives[0].temperature, both.weights) == (8.0, [1.0, 2.0])


def test_a_sum_of_one_and_a_sum_of_sums(kd):
    config = parse(kd, "--variants.one Sum --variants.one.objectives Hinton")
    assert len(cli.build(config.variants["one"], "variants.one").objectives) == 1
    line = "--variants.s Sum --variants.s.objectives '[{class_path: Sum, objectives: [Hinton, Hint]}, Cosine]'"
    config = parse(kd, f"{line} --variants.s.objectives.0.objectives.0.temperature 5")
    assert cli.build(config.variants["s"], "variants.s").objectives[0].objectives[0].temperature == 5.0


def test_classes_of_ones_own(kd, mine):
    own = "--teacher mypackage.MyNet --teacher.width 5"
    config = parse(kd, f"{own} --variants.mine mypackage.Mine --variants.mine.flavour sour")
    assert config.teacher == cli.Choice("mypackage.MyNet", {"width": 5, "backbone": None})
    net = cli.build(config.teacher, "teacher", **IMAGES)  # which takes one of the two
    assert (net.width, net.num_classes) == (5, 10)
    assert cli.build(config.variants["mine"], "variants.mine").flavour == "sour"
    config = parse(kd, f"{own} --teacher.backbone ResNet --teacher.backbone.depth 8")
    assert isinstance(cli.build(config.teacher, "teacher", **IMAGES).backbone, nets.ResNet)
    parse(kd, "--teacher mypackage.Mine --teacher.flavour 3")  # an objective is a module, too


def test_a_class_without_types(kd, mine):
    config = parse(kd, "--teacher mypackage.Bare --teacher.width 5 --teacher.depth x")
    assert cli.build(config.teacher, "teacher", **IMAGES).found == (5, "x", None, {})


# Files


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("kd_settings", [
    "{init_args: {temperature: 4}}", "{temperature: 4}", "{class_path: Hinton, temperature: 4.0}",
    "{class_path: lit_modules.objectives.Hinton, init_args: {temperature: 4}}",
])  # fmt: skip
def test_a_file_merges_into_the_variants_by_name(kd, tmp_path, kd_settings):
    text = f"data: Digits\nvariants:\n  kd: {kd_settings}\n  t8: {{class_path: Hinton}}\n  hint: Cosine\n"
    variants = kd.parse(["--config", str(write(tmp_path / "my.yaml", text))]).variants
    assert variants["kd"].init_args == {**kd.parse(["--data", "Digits"]).variants["kd"].init_args, "temperature": 4.0}
    assert list(variants) == ["ce", "kd", "cosine", "hint", "t8"]
    assert variants["hint"].name == "Cosine"


def test_flags_override_files_and_files_earlier_files(kd, tmp_path):
    sgd = "optimizer: {class_path: SGD, lr: 1e-1, momentum: 0.9}\nseeds: [1]\ntrainer: {max_epochs: 2}"
    first = write(tmp_path / "1.yaml", sgd)
    second = write(tmp_path / "2.yaml", "seeds: 2\noptimizer: {lr: 0.2}\n")
    config = parse(kd, f"--optimizer.lr 0.3 --config {first} --config {second}")
    optimizer = config.optimizer.init_args
    assert (config.seeds, optimizer["lr"], optimizer["momentum"]) == ([0, 1], 0.3, 0.9)
    assert config.trainer.init_args["max_epochs"] == 2
    assert parse(kd, f"--config {first} {second}").optimizer.init_args["lr"] == 0.2
    adam = parse(kd, "--recipe null").optimizer
    assert parse(kd, f"--config {first} --optimizer Adam").optimizer == adam  # nothing of SGD's is left


DOTTED = {
    "trainer.max_epochs: 1": "--trainer.max_epochs 1",
    "trainer: {strategy: ddp, strategy.timeout: 5}": "--trainer.strategy ddp --trainer.strategy.timeout 5",
    "data.init_args.train_size: 100": "--data.train_size 100",
    "variants: {kd.temperature: 4, kd.init_args: {kd_weight: 1}}":
        "--variants.kd.temperature 4 --variants.kd.kd_weight 1",
    "variants.t8: {class_path: Hinton, init_args.temperature: 8}": "--variants.t8 Hinton --variants.t8.temperature 8",
    "student.class_path: ResNet\nstudent.depth: 8": "--student ResNet --student.depth 8",
    "trainer.callbacks: [LearningRateMonitor]\ntrainer.callbacks.0.logging_interval: step":
        "--trainer.callbacks [LearningRateMonitor] --trainer.callbacks.0.logging_interval step",
}  # fmt: skip


@pytest.mark.parametrize(("text", "line"), DOTTED.items(), ids=list(DOTTED))
def test_a_name_with_dots_in_a_file_is_that_flag(kd, tmp_path, text, line):
    path = write(tmp_path / "my.yaml", text)
    assert parse(kd, f"--config {path}") == parse(kd, line)


def test_a_file_has_sums_and_callbacks(kd, tmp_path):
    path = write(
        tmp_path / "my.yaml",
        "variants:\n  both:\n    class_path: Sum\n    init_args:\n      objectives:\n"
        "      - {class_path: Hinton, init_args: {temperature: 3}}\n      - Cosine\n      weights: [1, 0.5]\n"
        "trainer:\n  callbacks:\n  - {class_path: EarlyStopping, init_args: {monitor: val/loss}}\n",
    )
    config = parse(kd, f"--config {path} --variants.both.objectives.1.cosine_weight 1")
    both = cli.build(config.variants["both"], "variants.both")
    assert (both.objectives[0].temperature, both.objectives[1].cosine_weight) == (3.0, 1.0)
    assert cli.arguments(config.trainer, "trainer")["callbacks"][0].monitor == "val/loss"


EVERYTHING = (
    "--data CIFAR10 --data.root X --teacher ResNet --teacher.depth 8 --variants.both Sum --variants.both.objectives "
    "[Hinton,Cosine] --optimizer.betas [0.8,0.9] --scheduler CosineAnnealingLR --scheduler.T_max 10 --only ce both "
    "--trainer.callbacks [LearningRateMonitor] --trainer.max_time '{minutes: 3}' --seeds [7] --out runs/x"
)


@pytest.mark.parametrize("line", [
    "", EVERYTHING, "--trainer.profiler SimpleProfiler --trainer.profiler.filename x",
    "--trainer.strategy ddp_fork --trainer.strategy.timeout 60 --exact 8", "--trainer.strategy deepspeed",
    "--trainer.callbacks Timer",
])  # fmt: skip
def test_what_is_printed_is_read_back(kd, tmp_path, capsys, line):
    with pytest.raises(SystemExit) as end:
        parse(kd, f"{line} --print_config")
    printed = capsys.readouterr()
    assert (end.value.code, printed.err) == (0, "")
    again = kd.parse(["--config", str(write(tmp_path / "all.yaml", printed.out))])
    assert kd.as_dict(again) == kd.as_dict(parse(kd, line))
    save(kd, parse(kd, line), tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    of_run = yaml.safe_load(printed.out).items()
    assert saved == {key: value for key, value in of_run if kd.on_resume(key) is not cli.CALL}


# What is made of it


def test_building_makes_new_instances_with_what_the_data_gives(kd):
    config = parse(kd, "--student ResNet --student.depth 8 --data Digits --data.batch_size 7")
    nets_made = [cli.build(config.student, "student", **IMAGES) for _ in range(2)]
    assert nets_made[0] is not nets_made[1]
    assert nets_made[0].stem[0].in_channels == 1
    assert cli.build(config.data, "data").batch_size == 7
    for bound in (cli.factory(config.optimizer, "optimizer"), config):
        assert pickle.loads(pickle.dumps(bound))
    optimizer = pickle.loads(pickle.dumps(cli.factory(config.optimizer, "optimizer")))(nets_made[0].parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.defaults["lr"] == 1e-3


def test_a_scheduler_with_a_function(kd):
    config = parse(kd, "--optimizer.lr 1e-3 --scheduler LambdaLR --scheduler.lr_lambda math.exp")
    optimizer = cli.factory(config.optimizer, "optimizer")(torch.nn.Linear(1, 1).parameters())
    assert cli.factory(config.scheduler, "scheduler")(optimizer).get_last_lr() == [1e-3]
    assert kd.as_dict(config)["scheduler"]["init_args"]["lr_lambda"] == "math.exp"


def test_trainers_share_nothing(kd):
    line = (
        "--data MNIST --trainer.callbacks [LearningRateMonitor] --trainer.profiler SimpleProfiler --trainer.devices 1"
    )
    config = parse(kd, line)
    first, second = (cli.arguments(config.trainer, "trainer") for _ in range(2))
    assert isinstance(first["callbacks"][0], callbacks.LearningRateMonitor)
    assert first["callbacks"][0] is not second["callbacks"][0]
    assert first["profiler"] is not second["profiler"]
    trainer = cli.build(config.trainer, "trainer", accelerator="cpu", enable_progress_bar=False, logger=False)
    assert isinstance(trainer, Trainer)
    assert trainer.max_epochs == 10


def test_only(kd):
    variants = parse(kd, "--data Digits").variants
    assert list(pick(variants, None)) == ["ce", "kd", "cosine", "hint"]
    assert list(pick(variants, ["hint", "ce", "ce"])) == ["ce", "hint"]


# What is refused: tests/frozen/wrong_inputs.yaml, and what depends on more than a line and a file

DATA = Classes((datamodules.InMemoryData, datamodules.ImageData), datamodules)
METHODS = Classes((objectives.Objective, objectives.FeatureObjective), objectives)


def test_names_that_are_near_are_told():
    assert DATA.expected("MNISt").endswith(" or the import path of a class; near: MNIST")
    assert METHODS.expected("Hintn").endswith("near: Hinton, Hint")
    assert METHODS.expected().startswith(f"{next(iter(METHODS.by_name))}, ")
    assert "Objective" not in METHODS.expected()


def test_an_option_of_other_classes_is_told(kd):
    assert refused(kd, "--data.root x").endswith("LabelledText, MNIST, ... there is root")
    assert "with" not in refused(kd, "--student.input_shape 3")  # which the data give
    assert "there is" not in refused(kd, "--trainer.strategy ddp --trainer.strategy.accelerator x")


def test_the_working_directory_comes_first(kd, mine, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(experiment.__file__).parent)  # which has an attention.py
    text = "import torch\nfrom lit_modules.objectives import Hinton\nclass Mine(Hinton): pass\n"
    text += "def rate(epoch):\n    return 0.5\nclass Flip(torch.nn.Module):\n    def forward(self, image):\n"
    write(tmp_path / "attention.py", f"{text}        return 255 - image\n")
    try:
        config = parse(kd, "--scheduler LambdaLR --scheduler.lr_lambda attention.rate")
        assert kd.as_dict(config)["scheduler"]["init_args"]["lr_lambda"] == "attention.rate"
        assert parse(kd, "--variants.mine attention.Mine").variants["mine"].class_path == "attention.Mine"
        images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
        flip = Transforms(["attention.Flip"], (1, 8, 8))
        assert (flip(images, 0, torch.tensor([0])) == 255).all()
    finally:
        sys.modules.pop("attention", None)


# Going on

BEGUN = "--variants.kd.temperature 2.5 --teacher ResNet --teacher.depth 8"


@pytest.fixture
def run(kd, tmp_path):
    """A run's folder with its settings."""
    out = tmp_path / "t4"
    out.mkdir()
    save(kd, parse(kd, f"{BEGUN} --seeds 2"), out / "config.yaml")
    return out


def test_resuming_takes_the_settings_from_the_folder(kd, run):
    config = parse(kd, f"--out {run} --resume true")
    assert config.variants["kd"].init_args["temperature"] == 2.5
    assert (config.teacher.name, config.seeds, config.resume, config.out) == ("ResNet", [0, 1], True, str(run))


@pytest.mark.parametrize(("labels", "drawn"), [("--data.labelled 20", "split"), ("--data Digits", "seed")])
def test_a_run_from_before_an_option_resumes_as_it_was_made(kd, run, labels, drawn):
    save(kd, parse(kd, f"{BEGUN} {labels}"), run / "config.yaml")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    del settings["data"]["init_args"]["labelled_by"]
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    config = parse(kd, f"--out {run} --resume true --seeds 3")
    assert config.data.init_args["labelled_by"] == drawn


def test_a_run_from_before_options_that_are_off_goes_on(kd, run):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings.pop("save_ckpt") is False
    assert settings.pop("teacher_epochs") is None
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    config = parse(kd, f"--out {run} --resume true --seeds 3")
    assert (config.save_ckpt, config.teacher_epochs) == (False, None)


@pytest.mark.parametrize("line", [
    "--trainer.devices 3", "--trainer.strategy ddp", "--trainer.strategy ddp_fork --trainer.strategy.timeout 60",
    "--trainer.strategy deepspeed", "--trainer.accelerator cpu --trainer.logger false",
    "--checkpoint_every 5", "--trainer.log_every_n_steps 1 --trainer.enable_progress_bar false",
    "--teacher.depth 8", "--variants.kd.temperature 2.5", "--seeds [0,1] --teacher ResNet",
])  # fmt: skip
def test_resuming_with_what_may_differ_or_does_not(kd, run, line):
    config = parse(kd, f"{line} --out {run} --resume true")
    assert config.variants["kd"].init_args["temperature"] == 2.5
    assert config.trainer.init_args["devices"] == (3 if "devices" in line else "auto")
    assert isinstance(config.trainer.init_args["strategy"], cli.Choice) == ("strategy ddp" in line)


@pytest.mark.parametrize("line", [
    "--seeds 3", "--seeds [7,1,0]", "--trainer.max_epochs 21", "--variants.new Hinton --variants.new.temperature 8",
    "--seeds 3 --trainer.max_epochs 20 --variants.a Hint --variants.b Hint",
])  # fmt: skip
def test_resuming_with_more_is_as_if_started_so(kd, run, line):
    grown, whole = parse(kd, f"{line} --out {run} --resume true"), parse(kd, f"{BEGUN} --seeds 2 {line}")
    assert kd.as_dict(grown) | {"out": None, "resume": False} == kd.as_dict(whole)
    assert list(grown.variants) == list(whole.variants)


@pytest.mark.parametrize(("begun", "line"), [
    *(("--only ce", line) for line in (
        "--only ce kd", "--only kd ce", "--only null", "--only ce --variants.kd Cosine",
        "--only ce new --variants.new Hinton", "--only null --variants.new Hinton",
    )),
    ("--scheduler OneCycleLR --scheduler.max_lr 0.1 --scheduler.total_steps 25", "--trainer.max_epochs 25"),
])  # fmt: skip
def test_resuming_with_more_of_what_there_is(kd, run, begun, line):
    save(kd, parse(kd, begun), run / "config.yaml")
    parse(kd, f"{line} --out {run} --resume true")


def test_resuming_under_another_strategy_than_one_with_options(kd, run):
    save(kd, parse(kd, "--trainer.strategy ddp_fork --trainer.strategy.timeout 60"), run / "config.yaml")
    config = parse(kd, f"--trainer.strategy auto --out {run} --resume true")
    assert config.trainer.init_args["strategy"] == "auto"


def test_resuming_does_not_ask_what_the_defaults_are_now(kd, run):
    other = cli.Parser("kd.py", "", kd.options.target)
    net = cli.Classes((nets.Net, torch.nn.Module), nets, frozenset({"input_shape", "num_classes"}))
    other.add_choice("data", cli.Classes((datamodules.ImageData,), datamodules), "MNIST")
    other.add_choice("teacher", net, "LightNN")
    other.add_choice("student", net, "ResNet")
    kd9 = {"class_path": "Hinton", "temperature": 9}
    other.add_variants("variants", cli.Classes((objectives.Objective,), objectives), {"kd": kd9, "x": "Hint"}, NAMES)
    add_optimizer(other, {"class_path": "SGD", "lr": 1}, apart=["teacher"])
    other.add_choice("metric", MetricClasses(), "f1", on_resume=cli.FREE)
    add_trainer(other, max_epochs=99, max_steps=4)
    one, same = (parser.as_dict(parse(parser, f"--out {run} --resume true")) for parser in (other, kd))
    for settings in (one, same):  # null for names that are those of defaults now
        settings["variants"] = {name: choice for name, choice in settings["variants"].items() if choice}
    assert one == same


def test_resuming_where_there_is_no_run_starts_the_one_that_is_described(kd, tmp_path):
    for out in (tmp_path, tmp_path / "missing"):
        assert parse(kd, f"--out {out} --resume true --seeds 1 --data Digits").seeds == [0]
        for line in ("", "--seeds 5", "--trainer.devices 2 --checkpoint_every 5"):  # of a run that was to go on
            assert refused(kd, f"--out {out} --resume true {line}") == (
                f"out {out}: expected the folder of a run to go on with; there is no config.yaml in it, and no setting "
                "for a new run"
            )


def test_resuming_from_damaged_settings(kd, run):
    write(run / "config.yaml", "data: [")
    assert refused(kd, f"--out {run} --resume true").startswith(f"out {run / 'config.yaml'}: expected YAML")


def test_resuming_a_run_with_options_that_are_gone(kd, run):
    """Those that were off are dropped; of any other one line says which it is, and where."""
    path = run / "config.yaml"
    settings, expected = path.read_text(), parse(kd, f"--out {run} --resume true")
    path.write_text(f"{settings}student_seconds: null\nswitch: false\n")
    assert parse(kd, f"--out {run} --resume true") == expected
    of_data = yaml.safe_load(settings)
    of_data["data"]["init_args"] |= {"balanced": False, "augment_repeats": None}
    path.write_text(yaml.safe_dump(of_data))
    assert parse(kd, f"--out {run} --resume true") == expected
    path.write_text(f"{settings}student_seconds: 2.0\n")
    said = refused(kd, f"--out {run} --resume true")
    assert said.startswith("student_seconds 2.0: expected a flag of kd.py")
    assert said.endswith(f"(in {path})")


# Errors


def test_arguments_that_a_text_marks_are_flags_on_the_command_line() -> None:
    """Those that there are: other libraries have their own words in backticks."""
    text = "none beside `exact`, or `out FOLDER`; `drop_last`, `data.pack false`, `unset RANK`, ``seeds``"
    flags = "none beside --exact, or --out FOLDER; `drop_last`, `data.pack false`, `unset RANK`, ``seeds``"
    assert cli.as_flags(text, cli.Parser("kd.py", "", RunOptions)) == flags


@pytest.mark.parametrize(
    "flags", ["--out {}", "--out={}", "--only ce {}", "--data.root {}", "--config {}", "--config file"]
)
def test_no_text_has_a_nul(kd, tmp_path, monkeypatch, flags):
    """Which no path can have: the system's functions would end in a traceback."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text('data: {class_path: MNIST, init_args: {root: "a\\0b"}}')
    with pytest.raises(BadInput) as caught:
        kd.parse([word.format("a\0b") for word in flags.split()])
    flag = "data.root" if flags.endswith("file") else flags[2:].replace("=", " ").split()[0]
    assert str(caught.value) == f"{flag} a\\0b: expected text without the character NUL"


GO_ON = "--out FOLDER --resume true goes on from its checkpoint, if it left one"
LESS = "with more --trainer.devices each needs less"


def failing(error, parser=None):
    """A command that ends so."""

    @cli.one_line_errors(parser)
    def main(argv):
        raise error

    return main


def raised(error):
    """As our launchers hand on what a rank raised: with its error as the cause."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text = f"{kind}: {error}" if str(error) else kind
    raised = ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n...\n{text}\n", 1, 4321)
    raised.__cause__ = error
    return raised


@pytest.mark.parametrize(("error", "expected"), [
    (BadInput("data.root", "X", "a\nfolder"), "--data.root X: expected a folder"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/x"),
     "no space left on the disk: runs/x; what was finished is kept"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: /x"),
    (RankTimeoutError("timeout", 5, "rank 1"), "--timeout 5: expected rank 1"),
    (NotFiniteError("exact", 8, "less"), "--exact 8: expected less"),
    (raised(BadInput("data.root", 2, "3")), "--data.root 2: expected 3"),
    (raised(RankTimeoutError("timeout", 5, "rank 1")), "--timeout 5: expected rank 1"),
    (raised(NotFiniteError("exact", 8, "less")), "--exact 8: expected less"),
    (raised(ConnectionError("rank 1 has gone")), "rank 1 has gone"),
    (ProcessExitedException("", 1, 4321, -9, "SIGKILL"), f"rank 1 was killed by SIGKILL; {GO_ON}"),
    (ProcessExitedException("", 1, 4321, 3), f"rank 1 ended with exit code 3; {GO_ON}"),
    (raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")),
     f"rank 1 had no memory for 2.00 GiB more; {LESS}; {GO_ON}"),
    (raised(RuntimeError("CUDA error: out of memory\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")),
     f"rank 1 had no memory; {LESS}; {GO_ON}"),
    (raised(MemoryError()), f"rank 1 had no memory; {LESS}; {GO_ON}"),
    (ProcessRaisedException("\nRuntimeError: can't allocate memory: you tried to allocate 400 bytes", 1, 1),
     f"rank 1 had no memory for 400 bytes more; {LESS}; {GO_ON}"),  # it could not be sent
    (MemoryError(), f"this process had no memory; {LESS}; {GO_ON}"),
])  # fmt: skip
def test_one_line(refusal, error, expected):
    assert refusal(failing(error)) == expected


@pytest.mark.parametrize("line", [
    "--data Text --teacher GPT --student RNNClassifier --student.num_classes 20",
    "--student.num_classes 20 --student RNNClassifier --teacher GPT --data Text",
    "--data Shakespeare --student RNNClassifier --teacher RNNClassifier --student.vocab_size 128",
])  # fmt: skip
def test_what_the_data_does_not_give_is_an_option_of_nets(kd, line, tmp_path):
    config = parse(kd, line)
    assert {"num_classes": 20, "vocab_size": 128}.items() & config.student.init_args.items()
    (tmp_path / "config.yaml").write_text(kd.dump(config))
    assert parse(kd, f"--config {tmp_path}/config.yaml") == config


@pytest.mark.parametrize("library", [torch, np])
def test_too_little_memory_is_told(refusal, library):
    line = refusal(cli.one_line_errors()(lambda _: library.empty(10**15)))
    size = "(4000000000000000 bytes|7.11 PiB)"
    assert re.fullmatch(f"this process had no memory for {size} more; {LESS}; {GO_ON}", line)


def test_a_full_disk_under_torch_save(refusal):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    assert "no space left" in refusal(cli.one_line_errors()(lambda _: torch.save(torch.zeros(100_000), "/dev/full")))


@pytest.mark.parametrize("error", [
    ValueError("ours"), KeyError("ours"), RuntimeError("ours"), raised(KeyError(3)), raised(ValueError("ours")),
    ValueError("depth 3: expected ours"), raised(ValueError("depth 3: expected ours")),
])  # fmt: skip
def test_our_own_mistakes_keep_their_traceback(kd, error):
    parse(kd, "--teacher ResNet --student ResNet")
    with pytest.raises(type(error)):
        failing(error, kd)([])


@pytest.mark.parametrize("where", [lambda error: error, raised], ids=["here", "in a rank"])
@pytest.mark.parametrize(("name", "flag"), [
    ("batch_size", "--data.batch_size"), ("data.batch_size", "--data.batch_size"), ("train_size", "--data.train_size"),
    ("only", "--only"), ("exact", "--exact"), ("devices", "--trainer.devices"),
    ("timeout", "--trainer.strategy.timeout"), ("start_method", "--trainer.strategy.start_method"),
    ("ce_weight", "ce_weight"), ("depth", "depth"),  # of which variant, and of which net, nobody knows
    ("tokens", "tokens"),  # of a call
])  # fmt: skip
def test_an_option_that_is_refused_when_it_is_used_is_told_by_its_flag(kd, refusal, where, name, flag):
    for strategy in ("", " --trainer.strategy ddp --trainer.strategy.timeout 5"):
        parse(kd, f"--teacher ResNet --teacher.depth 8 --student ResNet{strategy}")
        assert refusal(failing(where(BadInput(name, 3, "more")), kd)) == f"{flag} 3: expected more"


# Other experiments


@dataclass
class Quick(OneSeedOptions):
    """Options.

    Args:
        batches: how many.
        repeats: how often.
        quick: take small numbers where none are given.
    """

    batches: int = 3
    repeats: int = 7
    quick: bool = False
    quick_values: ClassVar[dict[str, int]] = {"batches": 1, "repeats": 2}


@pytest.mark.parametrize(("line", "expected"), [
    ("", (3, 7)), ("--quick true", (1, 2)), ("--quick true --batches 3", (3, 2)), ("--repeats 7 --quick true", (1, 7)),
    ("--quick true --repeats 5", (1, 5)), ("--quick false --batches 4", (4, 7)),
])  # fmt: skip
def test_quick_changes_what_is_not_given_even_if_that_is_the_default(tmp_path, line, expected):
    parser = cli.Parser("quick.py", "", Quick)
    config = parse(parser, line)
    assert (config.batches, config.repeats) == expected
    save(parser, config, tmp_path / "config.yaml")
    for again in (f"--config {tmp_path / 'config.yaml'}", f"--out {tmp_path} --resume true"):
        assert parser.as_dict(parse(parser, again)) | {"out": None, "resume": False} == parser.as_dict(config)


def test_another_experiment_needs_few_lines():
    @dataclass
    class Options(RunOptions):
        """Options.

        Args:
            rounds: how often.
        """

        rounds: int = 2

    parser = cli.Parser("other.py", "Another one.", Options)
    net = cli.Classes((nets.Net,), nets, frozenset({"input_shape"}))
    parser.add_choice("net", net, {"class_path": "ResNet", "depth": 8})
    config = parser.parse(["--rounds", "3", "--net.num_classes", "4"])
    chosen = {"depth": 8, "num_classes": 4, "norm": "batch", "widths": (16, 16, 32, 64), "shortcut": "pad"}
    assert (config.rounds, config.net.init_args) == (3, chosen)
