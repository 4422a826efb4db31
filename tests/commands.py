"""An experiment's command line, called here, and what it leaves."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.runs import folders

Refusal = Callable[..., str]  # the fixture `refusal` of conftest.py: (main, *flags) -> the line


def results(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())


def refused(
    main: Callable[[Sequence[str]], None],
    flags: Sequence[str],
    begins: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command ends with one line about a flag, before anything is computed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--out", str(tmp_path / "refused")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {begins}"), error
    assert says in error
    assert error.count("\n") == 1
    assert not [*tmp_path.glob("refused/seed*"), *tmp_path.glob("refused/results*")]


def left_by_overwriting(out: Path, tmp_path: Path) -> set[str]:
    """What a run with --overwrite true finds of this one in its folder, where the user's own files are left alone."""
    copy = shutil.copytree(out, tmp_path / "overwritten")
    foreign = {copy / name for name in ("seeds.txt", "seed_notes/a.txt", "float32/mine.txt", "trace_mine.json")}
    foreign |= {folder / name for folder in (copy, *copy.glob("seed*/**/")) for name in ("mine.txt", "mine.pt")}
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with folders.open_folder(copy, overwrite=True):
        left = {path for path in copy.rglob("*") if path.is_file() and (path.parent != copy or path.name[0] != ".")}
    assert {path for path in left if path in foreign and path.read_text() == "mine"} == foreign
    return {str(path.relative_to(copy)) for path in left - foreign}


def refused_elsewhere(
    main: Callable[[Sequence[str]], None],
    out: Path,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run, had it been measured on hardware with these changes, does not go on here, and stays as it was."""
    copy = shutil.copytree(out, tmp_path / "elsewhere")
    found = results(copy)
    now = {key: found["hardware"][key] for key in changes}
    (copy / "results.json").write_text(json.dumps(found | {"hardware": found["hardware"] | changes}))
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(copy), "--resume", "true"])
    assert stop.value.code == 2
    differ = "; ".join(f"{key} {changes[key]}, not {now[key]}" for key in changes)
    expected = f"the machine on which the rows in {copy} were measured: {differ}; or take another --out"
    assert capsys.readouterr().err == f"error: --resume true: expected {expected}\n"
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix} == before
