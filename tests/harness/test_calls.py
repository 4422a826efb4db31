"""environment.json: the calls of a run, and the commit of the code that ran."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.runs import environment
from harness.runs.environment import checkout, commits, facts
from harness.runs.files import write_json

UNKNOWN = {"commit": None, "dirty": None, "changed": None}


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@here"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of 25 files in `package`; one that is not tracked lies beside these."""
    package = tmp_path / "repository" / "package"
    package.mkdir(parents=True)
    for number in range(25):
        (package / f"{number:02}.py").write_text("a")
    git(tmp_path, "init", "-q", "repository")
    git(package, "add", "-A")
    git(package, "commit", "-q", "-m", "first")
    (package / "new.py").write_text("a")
    return package


def test_a_checkout_has_a_commit_and_its_changes(repository: Path) -> None:
    commit, first = git(repository, "rev-parse", "HEAD"), repository / "00.py"
    assert checkout(first) == {"commit": commit, "dirty": False, "changed": []}
    (repository / "07.py").write_text("b")
    git(repository, "rm", "-q", "--cached", "03.py")
    assert checkout(first) == {"commit": commit, "dirty": True, "changed": ["package/03.py", "package/07.py"]}
    for path in repository.glob("*.py"):
        path.write_text("b")
    assert checkout(first)["changed"] == [f"package/{number:02}.py" for number in range(20)]
    assert git(repository, "status", "--porcelain").count("\n") == 26


def test_what_no_repository_tracks_has_no_commit(repository: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "x.py").touch()
    empty = tmp_path / "empty"
    git(tmp_path, "init", "-q", "empty")
    (empty / "x.py").touch()
    git(empty, "add", "x.py")
    for file in (repository / "new.py", tmp_path / "x.py", empty / "x.py"):
        assert checkout(file) == UNKNOWN
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(repository / "00.py") == UNKNOWN


def test_a_slow_git_is_not_waited_for(repository: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "GIT_SECONDS", 0.1)
    assert checkout(repository / "00.py") == UNKNOWN


def test_each_call_adds_its_command_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(environment, "checkout", lambda _: {"commit": "ab", "dirty": True, "changed": ["x"]})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for argv in (["--variants.t8", "Hinton", "--data.root", "a b"], ["--resume", "true"]):
        write_json(tmp_path / "environment.json", facts(tmp_path, "kd.py", argv))
    found = json.loads((tmp_path / "environment.json").read_text())
    assert [call["command"] for call in found["calls"]] == [
        "kd.py --variants.t8 Hinton --data.root 'a b'",
        "kd.py --resume true",
    ]
    assert {"cpu", "cores", "memory_gib", "gpus", "python", "torch", "os", "threads"} <= set(found)
    assert found["omp_num_threads"] == "1"
    assert found["calls"][1]["launcher"] is None
    assert commits(tmp_path) == ["ab-dirty"]
    monkeypatch.setattr(sys, "argv", ["experiments/kd.py", "--out", "x"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "experiments/kd.py", "--out", "x"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    typed = facts(tmp_path, "kd.py", ["--out", "x"])["calls"]
    assert [call["command"] for call in typed[2:]] == ["python -u experiments/kd.py --out x"]
    assert typed[2]["launcher"] == {"name": "hand", "ranks": 2, "nodes": 1}


@pytest.mark.parametrize("content", ["", "[" * 99999, "[1]", "{}", '{"calls": null}', '{"calls": [3]}', b"\xff"])
def test_calls_that_are_not_known_are_null(tmp_path: Path, content: str | bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr(environment, "checkout", lambda _: {"commit": "ab", "dirty": False, "changed": []})
    path = tmp_path / "environment.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    write_json(path, facts(tmp_path, "kd.py", []))
    assert json.loads(path.read_text())["calls"][0] is None
    assert commits(tmp_path) == [None, "ab"]


def test_a_run_without_a_file_has_no_commits(tmp_path: Path) -> None:
    assert commits(tmp_path) == []
    assert environment.last_commit(tmp_path) is None


def test_the_last_call_s_commit_is_the_last_also_if_it_was_the_first(tmp_path: Path, monkeypatch: Any) -> None:
    for commit in "aba":
        known = {"commit": commit, "dirty": False, "changed": []}
        monkeypatch.setattr(environment, "checkout", lambda _, known=known: known)
        write_json(tmp_path / "environment.json", facts(tmp_path, "kd.py", []))
    assert (commits(tmp_path), environment.last_commit(tmp_path)) == (["a", "b"], "a")
