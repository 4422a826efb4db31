"""The benchmarks run, and measure every phase; what they find is for a quiet machine."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import gpt_speed, int8_speed, kd_speed, local_sgd
from tests.language import written
from tests.processes import Run


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
def test_the_bake_off_is_timed_beside_the_tutorial(
    photographs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    sizes = ["--images", "64", "--epochs", "1", "--threads", "1"]
    kd_speed.main(["--data", str(photographs), "--out", str(out), *sizes])
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
    assert found["hardware"]["cpu"]
    assert found["versions"]["torch"]
    printed = capfd.readouterr().out
    for shown in ("all students", "peak memory", "1/8", *students):
        assert shown in printed


@pytest.mark.slow
def test_local_sgd_is_compared_with_data_parallelism(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local_sgd.main(["--devices", "2", "--epochs", "1", "--periods", "1", "16", "--out", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["optimizer"], row["strategy"]) for row in rows] == [
        (optimizer, strategy)
        for optimizer in ("sgd", "adam")
        for strategy in ("ddp", "local_sgd k=1", "local_sgd k=16")
    ]
    assert all(row["losses"][-1][0] == 11 and row["seconds"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 7


@pytest.mark.slow
def test_a_language_models_step_is_timed_beside_a_plain_loop(tmp_path: Path) -> None:
    path = written(tmp_path, 2000)
    steps = {side: gpt_speed.milliseconds(gpt_speed.STEPS[side](path, 22)) for side in ("loop", "bare", "ours")}
    assert min(steps.values()) > 0
    data = gpt_speed.text(path)
    sizes = gpt_speed.BLOCK, gpt_speed.LAYERS, gpt_speed.HEADS, gpt_speed.WIDTH
    plain, ours = gpt_speed.PlainGPT(data.num_classes), gpt_speed.net_of(data, *sizes)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())
    x, y = gpt_speed.slices(gpt_speed.written(data, tmp_path))
    assert x.shape == y.shape == (12, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    found = {"steps": steps | {"compiled": 1.0, "bfloat16": 1.0}, "fetching": gpt_speed.fetching(path)}
    found["generation"] = {"recomputed": 3.0, "cached": 1.0}
    found["ratios"] = gpt_speed.ratios(*found.values())
    told = gpt_speed.table(found)
    assert "ours / bare" in told
    assert "1/3.0   target: at most 0.333" in told


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_int8_is_compared_with_float32(tmp_path: Path) -> None:
    run = Run(int8, tmp_path / "out.json", log=tmp_path / "log")
    run.wait()  # not faster on so few images, it ends with 1
    assert (tmp_path / "out.json").exists(), run.output
    found = json.loads((tmp_path / "out.json").read_text())
    rates = [found[name]["images_per_second"] for name in ("int8", "float32")]
    assert found["speedup"] == pytest.approx(rates[0] / rates[1])
    assert found["size_ratio"] == found["int8"]["onnx_bytes"] / found["float32"]["onnx_bytes"]
    assert "images/s" in run.output


def int8(out: Path) -> None:
    """What it measures, of a net that is compiled quickly; of ResNet-20 the sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets, images = int8_speed.both(20, 2)
        sizes = {name: int8_speed.onnx_bytes(net, images) for name, net in nets.items()}
        assert sizes["int8"] <= 0.3 * sizes["float32"], sizes
        int8_speed.main(["--depth", "8", "--batch_size", "2", "--repeats", "1", "--out", str(out)])
