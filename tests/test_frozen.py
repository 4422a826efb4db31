"""What must not move: bits, results, settings and messages are those of tests/frozen/; tests.freeze writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import freeze
from tests.grids import mostly_slow

WEIGHTS = yaml.safe_load((freeze.FOLDER / "weights.yaml").read_text())
SETTINGS = yaml.safe_load((freeze.FOLDER / "print_config.yaml").read_text())
WRONG = yaml.safe_load((freeze.FOLDER / "wrong_inputs.yaml").read_text())
SCRIPTS = sorted(SETTINGS["defaults"])


def outcome(out: Path) -> tuple[dict[str, str], Any]:
    """Hashes of the weights, and the results without times and without what differs between ways to start."""
    contents = freeze.without_times(json.loads((out / "results.json").read_text()))
    return freeze.hash_weights(out), {key: part for key, part in contents.items() if key != "config"}


@pytest.fixture(scope="module", params=freeze.EXACT)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """An exact run of one process: the experiment, and what it leaves."""
    folder = tmp_path_factory.mktemp("alone")
    freeze.run(folder, freeze.EXACT[request.param], freeze.WAYS[0])
    return request.param, outcome(folder / "run")


def test_exact_weights_are_the_frozen_ones(alone: tuple[str, Any]) -> None:
    if WEIGHTS["machine"] != freeze.describe_machine():
        pytest.skip(f"frozen on another machine: {WEIGHTS['machine']}")
    name, (weights, _) = alone
    assert weights == WEIGHTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("way", freeze.WAYS[1:])
def test_exact_runs_end_the_same_however_they_start(way: str, alone: tuple[str, Any], tmp_path: Path) -> None:
    name, expected = alone
    freeze.run(tmp_path, freeze.EXACT[name], way)
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize(
    "name", [pytest.param("quantize", marks=[pytest.mark.slow, pytest.mark.extras]), *mostly_slow(
        [name for name in freeze.RESULTS if name != "quantize"], "kd", "gpt"
    )],
)  # fmt: skip
def test_results(name: str, tmp_path: Path) -> None:
    frozen = json.loads((freeze.FOLDER / "results" / f"{name}.json").read_text())
    found = freeze.measure(tmp_path, name)
    assert found["files"] == frozen["files"]
    if name not in freeze.MACHINE_BOUND or frozen["machine"] == freeze.describe_machine():
        assert found["page"] == frozen["page"]
        assert_close(convert(found["results"]), convert(frozen["results"]))


def convert(found: Any) -> Any:
    """Results in the form of the newest format, from those of any: here the form may change, once."""
    return {key: value for key, value in found.items() if key != "format"}


def assert_close(found: Any, frozen: Any, place: str = "results") -> None:
    """Equal, numbers to a millionth."""
    if isinstance(frozen, dict):
        assert found.keys() == frozen.keys(), place
        for key in frozen:
            assert_close(found[key], frozen[key], f"{place}.{key}")
    elif isinstance(frozen, list):
        assert len(found) == len(frozen), place
        for number, part in enumerate(frozen):
            assert_close(found[number], part, f"{place}.{number}")
    elif isinstance(frozen, float):
        assert found == pytest.approx(frozen, rel=1e-6, abs=1e-9), place
    else:
        assert found == frozen, place


@pytest.mark.parametrize("script", SCRIPTS)
def test_print_config(script: str, tmp_path: Path) -> None:
    defaults = SETTINGS["defaults"][script]
    assert freeze.list_on(freeze.print_settings(tmp_path, script)) == defaults
    for line, changes in SETTINGS["commands"].items():
        if line.split()[0] == script:
            settings = freeze.list_on(freeze.print_settings(tmp_path, line))
            assert freeze.list_changes(settings, defaults) == changes, line


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case["command"], marks=[pytest.mark.extras] if case["command"].startswith("quantize") else [])
    for case in WRONG["cases"]
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of libraries, about what they do not get to do
def test_a_wrong_input_ends_with_its_line(case: Any, tmp_path: Path) -> None:
    assert freeze.read_refusal(tmp_path, case, WRONG["files"]) == case["line"]
