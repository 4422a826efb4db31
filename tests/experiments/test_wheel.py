"""The experiments as sub-commands: of an installed wheel, without a clone."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import apprentice
from experiments import __main__ as console
from experiments import kd
from tests.launching import ROOT, TINY, ended, weights
from tests.processes import Run


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["apprentice", *words])
    console.main()


def test_every_script_is_a_sub_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__main__"}
    assert {*console.SCRIPTS} == scripts
    call(monkeypatch, "--help")
    assert f"apprentice {{{','.join(sorted(scripts))}}} " in capsys.readouterr().out


def test_the_version_is_that_of_the_changelog(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--version")
    assert capsys.readouterr().out == f"apprentice {apprentice.__version__}\n"
    sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    released = next(section for section in sections if not section.startswith("Unreleased\n"))
    assert released.startswith(apprentice.__version__)
    assert f"version: {apprentice.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [(["kdd"], "kdd: expected one of attention, "), ([], "no experiment: expected one of attention, ")],
)
def test_a_wrong_name_is_refused(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        call(monkeypatch, *words)
    message = capsys.readouterr().err
    assert message.startswith(f"error: {line}")
    assert message.endswith("; did you mean kd?\n" if words else "quantize\n")


def run(command: list[str | Path], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_gives_what_a_clone_gives(tmp_path: Path) -> None:
    """Installed into an environment of its own, outside of the clone, beside the libraries of this one."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], ROOT)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "--no-index", "--no-deps", *tmp_path.glob("*.whl")], tmp_path)
    (site_packages,) = tmp_path.glob("venv/lib/*/site-packages")
    libraries = Path(pytest.__file__).parents[
        1
    ]  # its own .pth files, such as that of an editable install, are not read
    (site_packages / "libraries.pth").write_text(f"{libraries}\n")
    for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]:
        assert (site_packages / package / "py.typed").is_file(), package
    exact = [*TINY, "--exact", "2"]
    output = run([python.with_name("apprentice"), "kd", *exact, "--out", "run"], tmp_path)
    assert "run/report.html" in output
    (facts,) = json.loads((tmp_path / "run" / "environment.json").read_text())["calls"]
    assert facts["commit"] is None
    assert f"apprentice kd {' '.join(exact[:2])}" in facts["command"]
    ended([Run(kd.main, [*exact, "--out", str(tmp_path / "clone")], log=tmp_path / "log")])
    assert weights(tmp_path / "run") == weights(tmp_path / "clone")
