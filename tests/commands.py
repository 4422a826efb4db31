"""An experiment's command line, called here, and what it leaves."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


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
