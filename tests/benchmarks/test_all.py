"""benchmarks/all.sh and its page; steps and starts beside their rivals."""

import argparse
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import common, page, start_speed, step_speed
from benchmarks.common import Measurement, Target


def test_a_page_has_a_row_for_each_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement({}, {"a": common.over([3.0, 1.0, 2.0], [2.0, 2.0, 2.0]), "c": [0.2]})
    targets = {"a": Target("a over b", 0.9, 1.1), "c": Target("c over d", high=1 / 8)}
    common.run(argparse.Namespace(out=tmp_path / "new.json"), lambda _: measurement, targets)
    other = {"benchmark": "z_speed", "date": "2026-01-01", "rows": [["e over f", "1", "2", "0.5", "—"]]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# Title\n\n<!-- table -->\n\n<!-- end -->\n\nafter\n")
    page.main([str(tmp_path / "other.json")])
    page.main([str(tmp_path / "new.json")])
    once = (tmp_path / "page.md").read_text()
    page.main([str(tmp_path / "new.json")])  # in place of the rows before
    assert (tmp_path / "page.md").read_text() == once
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in once.splitlines() if line[:1] == "|"]
    today = json.loads((tmp_path / "new.json").read_text())["date"]
    assert rows[2:] == [
        ["test_all", "a over b", "2.00", "2.00", "1.000 (0.50 to 1.50)", "at least 0.9, at most 1.1", today],
        ["test_all", "c over d", "—", "—", "0.200 (0.20 to 0.20)", "at most 1/8   MISSED", today],
        ["z_speed", "e over f", "1", "2", "0.5", "—", "2026-01-01"],
    ]
    assert once.startswith("# Title\n\n")
    assert once.endswith("\n\nafter\n")


@pytest.mark.parametrize(
    ("names", "most", "refusal"),
    [
        (["kd_speed", "nosuch"], "1000", "error: nosuch: expected a benchmark's name, as in benchmarks/nosuch.py\n"),
        (["kd_speed"], "-1", "expected a quiet machine, at most -1\n"),
    ],
)
def test_all_benchmarks_want_a_quiet_machine(names: list[str], most: str, refusal: str, tmp_path: Path) -> None:
    script, environment = common.ROOT / "benchmarks" / "all.sh", {**os.environ, "MOST_LOAD": most, "OUT": str(tmp_path)}
    done = subprocess.run(["bash", script, *names], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(refusal)
    assert done.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_the_last_line_names_what_failed_or_missed_its_target(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "all.sh"
    script.write_bytes((common.ROOT / "benchmarks" / "all.sh").read_bytes())
    write = "import sys\nopen(sys.argv[2], 'w').write('{}')\n"
    programs = {
        "page": "",
        "good_speed": write.format(""),
        "missed_speed": write.format("MISSED"),
        "bad_speed": "1 / 0",
    }
    for name, program in programs.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(program)
    environment = {**os.environ, "MOST_LOAD": "1000", "OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "failed, or missed a target: bad_speed missed_speed"


def test_a_step_is_timed_beside_a_bare_loop() -> None:
    measurement = step_speed.measure(argparse.Namespace(rounds=1, steps=20))
    assert measurement.ratios.keys() == step_speed.TARGETS.keys()
    times = measurement.figures["ms a step"]
    assert measurement.ratios["linear"] == [times["linear, ours"][0] / times["linear, bare"][0]]
    assert min(times.values()) > [0]


def test_the_rivals_of_a_step_see_each_image_once() -> None:
    one_pass = step_speed.batches()
    images, labels = next(one_pass())
    assert (images.shape, labels.shape) == ((128, 1, 8, 8), (128,))
    assert max(len(labels) for _, labels in one_pass()) == 128
    every = torch.cat([images.flatten(1) for images, _ in one_pass()])
    assert len(every) == len(every.unique(dim=0)) == 1437


@pytest.mark.slow
def test_a_refusal_is_timed_beside_lightnings_import() -> None:
    measurement = start_speed.measure(argparse.Namespace(rounds=1, only=["compare"]))
    seconds = measurement.figures["s"]
    assert measurement.ratios == {"compare, refusal": [seconds["compare, refusal"][0] / seconds["import"][0]]}
    assert start_speed.TARGETS.keys() >= measurement.ratios.keys()
