"""Runs of one seed each, pooled, are one run with all seeds."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments import compare, kd
from tests import waiting
from tests.commands import Refusal, lasting, results

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--data", "Digits",
    "--data.train_size", "60", "--data.test_size", "50", "--teacher", "LightNN", "--only", "ce", "hint",
]  # fmt: skip
FLAGS += ["--trainer.max_epochs", "1", "--trainer.logger", "false"]
DIFFERENT = ("config", "pooled", "commits")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole` with the seeds 0, 1, 2; `a` with 1; `b` with 0 and 2."""
    folder = tmp_path_factory.mktemp("pool")
    for name, seeds in {"whole": "3", "a": "[1]", "b": "[0,2]"}.items():
        kd.main([*FLAGS, "--seeds", seeds, "--out", str(folder / name)])
    return folder


@pytest.mark.drawn
def test_pooled_is_one_run_with_all_seeds(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    compare.main(["--pool", str(runs / "a"), str(runs / "b"), "--out", str(tmp_path / "pooled")])
    shown = capsys.readouterr().out
    whole, pooled = (results(folder) for folder in (runs / "whole", tmp_path / "pooled"))
    assert lasting(pooled, *DIFFERENT) == lasting(whole, *DIFFERENT)
    assert pooled["config"]["seeds"] == pooled["seeds"] == [0, 1, 2]
    assert pooled["pooled"] == ["a", "b"]
    assert "Pooled from: a, b" in (tmp_path / "pooled" / "results.md").read_text()
    again = (tmp_path / "pooled" / "report.html").read_text().partition("The command that repeats it")[2]
    assert [line.partition(" ")[0] for line in again.splitlines() if ".py " in line] == [
        "<pre><code>kd.py", "kd.py", "compare.py",
    ]  # fmt: skip
    told = (runs / "whole" / "results.md").read_text()
    assert all(line in shown.replace("\n", " ") for line in told.splitlines() if line.startswith("With 3 seeds"))


def test_what_differs_otherwise_is_refused(runs: Path, tmp_path: Path, refusal: Refusal) -> None:
    def pooled(other: Path, *flags: str | Path) -> str:
        return refusal(compare.main, "--pool", runs / "a", other, *flags)

    assert pooled(runs / "whole") == "whole: expected each seed once; 1 is in another run, too"
    for name, flags in {"long": ["--trainer.max_epochs", "2"], "other": ["--only", "ce"]}.items():
        kd.main([*FLAGS, *flags, "--seeds", "[7]", "--out", str(tmp_path / name)])
    line = pooled(tmp_path / "long")
    assert "differs from" in line
    assert "trainer.max_epochs is 2, not 1" in line
    assert "not ['ce', 'hint']" in pooled(tmp_path / "other")
    found = results(runs / "b")
    found["classes"].reverse()
    (tmp_path / "order").mkdir()
    (tmp_path / "order" / "results.json").write_text(json.dumps(found))
    assert "in its seeds alone; classes is ['9', '8'," in pooled(tmp_path / "order")
    held = "expected a folder without a run or another table; this one holds config.yaml"
    assert pooled(runs / "b", "--out", runs / "whole").endswith(held)


@pytest.mark.slow
def test_jobs_of_an_array_have_a_seed_each(runs: Path, tmp_path: Path) -> None:
    given = {**os.environ, "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4", "OUT": str(tmp_path / "9")}
    command = ["bash", str(ROOT / "docs" / "slurm_seeds.sbatch"), *FLAGS]
    subprocess.run(command, cwd=ROOT, env=given, check=True, timeout=waiting.LIMIT, stdout=subprocess.DEVNULL)
    shutil.copytree(runs / "a", tmp_path / "9" / "1")  # that of another job
    compare.main(["--pool", *map(str, sorted((tmp_path / "9").iterdir())), "--out", str(tmp_path / "all")])
    assert results(tmp_path / "all")["seeds"] == [1, 4]
