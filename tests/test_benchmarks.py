"""The benchmarks run, and measure every phase; what they find is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Noise: seven images of each of ten classes."""
    noise = np.random.default_rng(0).integers(0, 256, (70, 32, 32, 3), dtype=np.uint8)
    for i, pixels in enumerate(noise):
        folder = tmp_path / "photographs" / "train" / f"class{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path / "photographs"


@pytest.mark.slow
def test_the_bake_off_is_timed_beside_the_tutorial(photographs: Path, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    command = [sys.executable, str(BENCHMARKS / "kd_speed.py"), "--data", str(photographs), "--out", str(out)]
    run = subprocess.run(
        [*command, "--images", "64", "--epochs", "1", "--threads", "1"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    students = ["ce", "kd", "cosine", "hint"]
    phases = {
        "tutorial": {"teacher", *students, "students", "total", "peak_mib"},
        "ours": {"teacher", "students", "storing", "total", "peak_mib"},
        "ratios": {"teacher", "students", "total", "peak_mib"},
    }
    for part, names in phases.items():
        assert set(found[part]) == names
        assert all(figure > 0 for figure in found[part].values())
    assert found["tutorial"]["students"] == pytest.approx(sum(found["tutorial"][name] for name in students))
    assert found["threads"] == {"tutorial": 1, "ours": 1}
    assert found["wait_policy"]["ours"] == "PASSIVE"
    assert found["hardware"]["cpu"] and found["versions"]["torch"]
    for shown in ("all students", "peak memory", "1/8", *students):
        assert shown in run.stdout
