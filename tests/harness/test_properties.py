"""Whatever a command line or a YAML file says, an experiment takes it, or ends with exit code 2 and one line."""

import contextlib
import io
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import attention, comm, gpt, hardware, kd, pipeline, quantize
from harness import cli
from harness.cli.sources import flat

EXPERIMENTS = (kd, gpt, quantize, hardware, pipeline, comm, attention)
HOSTILE = [
    "", " ", "-", "--", "[", "]", "{", "}", '"', "'", "?", "=", "<<", "@x", "%", "`", "${HOME}", "é", "\x00",
    "\x1b[31m", "a\nb", "*a", "!!int x", "!!bool maybe", "!!python/object:os.system", "!!binary aGk=",
    "!!set {a, b}", "!!timestamp 2020-13-45", "null", "true", "[]", "{}", "[1, 2]", "[[1]]", "[null]", "[{}]",
    "{a: 1}", "{init_args: 3}", "{class_path: x}", "{class_path: {}}", "0", "-1", "1e3", "1e300", "-1e300", "[1e300]",
    ".nan", ".inf", "-.inf", "nan", "0x10", "1_0", "1:99", "00:00:00:00", "9" * 25, "9" * 5000, "x" * 3000,
    "Digits", "Adam", "DeepNN", "Hinton", "Sum", "ddp", "pipeline", "EarlyStopping",
    "ModelCheckpoint", "Timer", "SimpleProfiler", "a.b.c", "os.system", "os.path", "torch.nn.Linear", "torch.nn.Module",
    ".", "..", "a.", ".a", "torch.", "lightning.pytorch.Trainer",
]  # fmt: skip
NAMES = ["", "x", "é", "0", "0.x", "-1", "class_path", "init_args", "init_args.lr", "lr", "monitor", "x" * 300]
LETTERS = st.characters(codec="utf-8", exclude_characters="\x85")  # which PyYAML reads as a space
ALL_CHECKS = list(HealthCheck)
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=ALL_CHECKS)
MANY = settings(QUICK, max_examples=700)


@cache
def parser(experiment: Any) -> cli.Parser:
    return experiment.parser()


@cache
def flags(experiment: Any) -> list[str]:
    """All that `--help all` lists."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        parser(experiment).parse(["--help", "all"])
    return sorted(set(re.findall(r"--([\w.]+)", out.getvalue())))


@cache
def settings_of(experiment: Any) -> list[tuple[str, str]]:
    """All flags with the values that they have anyway, as text."""
    config = parser(experiment).as_dict(parser(experiment).parse([]))
    return [(f"--{flag}", yaml.safe_dump(value).removesuffix("\n...\n").strip()) for flag, value in flat(config)]


def words() -> st.SearchStrategy[str]:
    numbers = st.one_of(st.integers(), st.floats()).map(str)
    return st.one_of(st.sampled_from(HOSTILE), st.text(LETTERS, max_size=12), numbers)


def names(experiment: Any) -> st.SearchStrategy[str]:
    known = st.sampled_from(flags(experiment))
    return st.one_of(known, known, st.builds("{}.{}".format, known, st.sampled_from(NAMES)))


def arguments(experiment: Any) -> st.SearchStrategy[list[str]]:
    flag = names(experiment).map("--{}".format)
    pair = st.one_of(st.sampled_from(settings_of(experiment)), st.tuples(flag, words()))
    pairs = st.lists(pair, max_size=3).map(lambda found: [word for pair in found for word in pair])
    return st.one_of(pairs, st.builds(list.__add__, pairs, st.lists(st.one_of(flag, words()), max_size=3)))


def documents(experiment: Any) -> st.SearchStrategy[str]:
    """YAML of nested or dotted settings, cut somewhere or not, and any other text."""
    value = st.one_of(words(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(words(), max_size=3))
    leaves = st.one_of(
        value, st.dictionaries(st.one_of(words(), st.integers(), st.sampled_from(NAMES)), value, max_size=3)
    )
    dotted = st.dictionaries(names(experiment), leaves, max_size=4)
    trees = st.one_of(dotted, dotted.map(nested)).map(lambda found: yaml.safe_dump(found, allow_unicode=True))
    cut = st.tuples(trees, st.integers(0, 60)).map(lambda found: found[0][: -found[1] or None])
    return st.one_of(trees, cut, words())


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """A mapping for each level of dotted names; of two that don't go together the first is left out."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inside, (*parents, last) = found, name.split(".")
        for parent in parents:
            if not isinstance(inside.get(parent), dict):
                inside[parent] = {}
            inside = inside[parent]
        inside[last] = value
    return found


def ends(experiment: Any, argv: list[str]) -> tuple[object, str]:
    """The exit code of parsing, and what is said on stderr; what was parsed is the same when written and read."""
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are tried out
        try:
            with cli.one_line_errors(parser(experiment)):
                config = parser(experiment).parse(argv)
                before, after = parser(experiment).as_dict(config), yaml.safe_load(parser(experiment).dump(config))
                assert repr(before) == repr(after)
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


def check(experiment: Any, argv: list[str]) -> None:
    code, said = ends(experiment, argv)
    assert (code in {None, 0} and not said) or (code == 2 and re.fullmatch(r"error: [^\n]{1,5000}\n", said)), said


EACH = pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda module: module.__name__.rpartition(".")[2])


@EACH
@pytest.mark.parametrize("examples", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_any_flags(experiment: Any, examples: settings) -> None:
    @examples
    @given(arguments(experiment))
    def any_flags(argv: list[str]) -> None:
        check(experiment, argv)

    any_flags()


@EACH
@pytest.mark.parametrize("examples", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_any_file(experiment: Any, examples: settings, tmp_path: Path) -> None:
    @examples
    @given(documents(experiment))
    def any_file(text: str) -> None:
        (tmp_path / "my.yaml").write_text(text, "utf-8")
        check(experiment, ["--config", str(tmp_path / "my.yaml")])

    any_file()
