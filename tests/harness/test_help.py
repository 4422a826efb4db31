"""What the help shows, and which flag an unknown one's error names."""

import contextlib
import io
import re
import shlex
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from apprentice.errors import BadInput
from experiments import attention, comm, export, gpt, hardware, kd, pipeline, predict, quantize
from harness.cli.declarations import Group
from harness.cli.messages import USUAL
from harness.cli.signatures import options_of
from harness.cli.sources import flat
from harness.runs.options import RunOptions
from harness.studies.text.options import TextOptions

EXPERIMENTS = (kd, gpt, quantize, predict, export, hardware, pipeline, comm, attention)
PARSERS = {module.__name__.rpartition(".")[2]: module.parser() for module in EXPERIMENTS}  # type: ignore[attr-defined]


def help_of(name: str, line: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        PARSERS[name].parse(shlex.split(line))
    assert end.value.code == 0
    return out.getvalue()


@cache
def flags_of(name: str, line: str = "") -> set[str]:
    return set(re.findall(r"^  --([\w.]+)", help_of(name, f"{line} --help all"), re.MULTILINE))


@pytest.mark.parametrize("name", PARSERS)
def test_the_help_is_one_screen_of_flags_that_exist(name: str) -> None:
    text = help_of(name, "-h")
    assert text.startswith(f"usage: python experiments/{name}.py [--FLAG VALUE ...] [--help [all]]\n\n")
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= 80
    shown = re.findall(r"^  --([\w.]+)", text, re.MULTILINE)
    assert {flag.removesuffix(".NAME") for flag in shown} <= {*flags_of(name), "variants"}
    common = {*PARSERS[name].options.target.common}
    assert common <= {flag.removesuffix(".NAME") for flag in shown}


@pytest.mark.parametrize("name", PARSERS)
def test_all_of_the_help_has_every_setting(name: str) -> None:
    parser = PARSERS[name]
    text = help_of(name, "--help all")
    assert max(map(len, text.splitlines())) <= 120
    settings = {
        flag.replace(".init_args", "").removesuffix(".class_path") for flag, _ in flat(parser.as_dict(parser.parse([])))
    }
    assert {*settings} - parser.idle <= flags_of(name)


def test_all_of_the_help_is_in_groups_with_the_options_of_what_is_chosen() -> None:
    text = help_of("kd", "--help all --teacher ResNet")
    for flag in ("data.batch_size 128", "teacher.depth 20", "variants.kd.temperature 1.6", "trainer.max_epochs 20"):
        assert f"--{flag}" in text
    assert text.index("--seeds 3") < text.index("--recipe few-labels") < text.index("--data Digits")
    assert re.search(r"--trainer.gradient_clip_val 1.0 +The value at which to clip gradients\n", text)
    assert len(text.splitlines()) < 285


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("--data MNIST --help", ["data"]), ("--help data", ["data"]), ("--help data --seeds 3", ["data"]),
        ("--help trainer", ["trainer", "trainer.strategy", "trainer.logger"]),
        ("--trainer.strategy hsdp --help", ["trainer.strategy"]), ("--help student --data MNIST", ["student"]),
        ("--help --teacher.depth 3 --teacher ResNet --optimizer SGD", ["teacher", "optimizer"]),
    ],
)  # fmt: skip
def test_the_help_of_what_is_named_or_chosen(line: str, groups: list[str]) -> None:
    text = help_of("kd", line)
    assert re.findall(r"^([\w.]+): ", text, re.MULTILINE)[1:] == groups
    assert ("--data.root" in text) is ("data" in groups and "MNIST" in line)
    assert ("--trainer.strategy.shard_size 2" in text) is ("hsdp" in line)


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_docstring(name: str) -> None:
    parser = PARSERS[name]
    for group in [parser, *parser.groups]:
        options = options_of(group.options) if isinstance(group, Group) else group.options
        assert all(options.help.values()), options.help


def test_texts_add_options_which_kd_does_not_name() -> None:
    added = {field.name for field in fields(TextOptions)} - {field.name for field in fields(RunOptions)}
    assert added <= flags_of("kd", "--data Text")
    assert {f"--{name}" for name in added} <= {*help_of("kd", "--data Text --help").split()}
    assert not added & flags_of("kd")
    assert "; texts add some" in " ".join(help_of("kd", "-h").split())
    assert not [name for name in added if name in Path(kd.__file__).read_text()]
    for name in added:
        assert refusal("kd", [f"--{name}", "1"]) == f"--{name} 1: expected texts, not --data Digits"


@pytest.mark.parametrize("wrong", ["--teacher NoSuch", "--data '{x'", "--seeds many"])
def test_a_wrong_flag_does_not_keep_the_help_back(wrong: str) -> None:
    assert "--seeds 3" in help_of("kd", f"--help all {wrong}")


def test_the_installed_command_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "/usr/bin/apprentice", "kd"])
    monkeypatch.setitem(PARSERS, "kd", kd.parser())
    assert help_of("kd", "--help").startswith("usage: apprentice kd [--FLAG")
    assert "\nflags of apprentice kd:\n" in help_of("kd", "--help all")
    assert refusal("kd", ["--lr", "1"]) == "--lr 1: expected a flag of apprentice kd; near: --optimizer.lr"


def refusal(name: str, flags: list[str]) -> str:
    with pytest.raises(BadInput) as error:
        PARSERS[name].parse(flags)
    return f"--{error.value}"


@pytest.mark.parametrize("name", USUAL)
def test_a_name_of_other_programs_leads_to_a_flag_that_exists(name: str) -> None:
    folder = "--data ImageFolder --data.root x"
    suggested = re.search(r"; near: (.*)", refusal("kd", [*folder.split(), f"--{name.replace('_', '-')}", "1"]))
    assert suggested
    assert {flag.removeprefix("--") for flag in suggested[1].split(", ")} <= flags_of("kd", folder)


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("lr", "--optimizer.lr"), ("gpus", "--trainer.devices"), ("epochs", "--trainer.max_epochs"),
        ("seed", "--seeds, --data.seed"), ("cut-mix", "--data.cutmix"), ("amp", "--trainer.precision"),
        ("output-dir", "--out"), ("grad-clip-val", "--trainer.gradient_clip_val"), ("lerning_rate", "--optimizer.lr"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("values", [["1"], []], ids=["with a value", "without"])
def test_the_usual_names(flag: str, near: str, values: list[str]) -> None:
    assert refusal("kd", [f"--{flag}", *values]).endswith(f": expected a flag of kd.py; near: {near}")


def test_flags_of_the_chosen_class_are_near() -> None:
    line = refusal("kd", ["--data", "ImageFolder", "--data.root", "x", "--workers", "3"])
    assert line.endswith("near: --data.num_workers")
    assert "near" not in refusal("gpt", ["--workers", "3"])  # its data have no workers


def test_no_usual_name_is_one_of_ours() -> None:
    ours: dict[str, Any] = {name: flags_of(name) for name in PARSERS}
    assert not {*USUAL} & set.intersection(*ours.values())
