"""The benchmarks run, and measure every ratio; what they find is for a quiet machine."""

import importlib
import json
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import (
    common,
    data_speed,
    gpt_speed,
    gpu,
    int8_speed,
    kd_speed,
    local_sgd,
    rounding_spread,
    tune_speed,
    zoo_speed,
)
from benchmarks.common import Measurement, Target
from tests.benchmarks import forked
from tests.language import written
from tests.launching import until
from tests.processes import Run


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Noise: eight images of each of ten classes, one of them to test on."""
    noise = np.random.default_rng(0).integers(0, 256, (80, 32, 32, 3), dtype=np.uint8)
    for i, pixels in enumerate(noise):
        folder = tmp_path / "photographs" / ("train" if i < 70 else "test") / f"class{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path / "photographs"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some benchmarks would set these for all tests to come when they are imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


def measured(module: Any, out: Path, *flags: str) -> Any:
    """What a benchmark writes into its file."""
    module.main([*flags, "--out", str(out)])
    return json.loads(out.read_text())


def test_a_benchmark_replaces_a_benchmark_s_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text("{}")
    common.write_figures(tmp_path / "ours.json", "kd_speed", {"rows": []})
    command = common.parser("", ("--repeat", 1), "")
    assert command.parse_args(["--out", str(tmp_path / "ours.json")]).out == tmp_path / "ours.json"
    with pytest.raises(SystemExit, match="2"):
        command.parse_args(["--out", str(tmp_path / "mine.json")])
    assert "expected a new file, or a benchmark's figures, which is replaced" in capsys.readouterr().err


def test_a_killed_benchmark_leaves_nothing(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def measure() -> None:
        common.start_program(["sleep", "60"])
        common.call_fresh(os.execvp, "sh", ["sh", "-c", f"touch {begun}; exec sleep 60"], env={})

    run = Run(measure, log=tmp_path / "log")
    until(begun.exists, run)
    assert len(run.processes()) > 2
    run.process.kill()
    assert run.wait() == -signal.SIGKILL  # and nothing of its session is left


def test_targets_are_told_and_misses_marked() -> None:
    targets = {"a": Target("a over b", 0.9, 1.1), "c": Target("c over d", high=1 / 8), "e": Target("e over f", low=2.0)}
    measurement = Measurement({"ms": {"a": [3.0, 1.0, 2.0]}}, {"a": [0.5, 1.0, 3.0], "c": [0.2], "e": [2.5]})
    lines = common.table(measurement, targets).splitlines()[2:]
    assert [line.split("  ")[0] for line in lines] == ["a, ms", "a over b", "c over d", "e over f"]
    assert "2.00" in lines[0]
    assert "1.00 to 3.00" in lines[0]
    assert "at least 0.9, at most 1.1" in lines[1]
    assert ["MISSED" in line for line in lines] == [False, False, True, False]
    assert "at most 1/8" in lines[2]
    assert "0.200 = 1/5.0" in lines[2]
    assert Target("bytes", high=0.3).words(0.2) == "at most 0.3"


def test_rivals_take_turns_in_changing_order() -> None:
    calls: list[str] = []
    runs = common.take_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 2)
    assert calls == ["a", "b", "b", "a"]
    assert runs == {"a": [1, 4], "b": [2, 3]}
    assert common.over(runs["a"], runs["b"]) == [1 / 2, 4 / 3]


@pytest.mark.slow
def test_folders_are_read_beside_torchvision(tmp_path: Path) -> None:
    sizes = {"images": 40, "size": 32, "batch": 8, "workers": 1, "large": 0, "repeat": 1, "steps": 4}
    content = measured(data_speed, tmp_path / "a.json", *(f"--{name}={size}" for name, size in sizes.items()))
    assert content["ratios"].keys() == data_speed.TARGETS.keys() - {"peak"}  # of fresh processes, which are slow
    assert 0 < content["ratios"]["waiting"] < 1
    speeds = content["figures"]["images/s, light"]
    assert content["ratios"]["none / plain, light"] == pytest.approx(speeds["none"] / speeds["plain"])
    data_speed.generate(tmp_path / "few", 12)
    assert data_speed.peak(str(tmp_path / "few"), workers=1) > 0


@pytest.mark.slow
def test_the_bake_off_is_timed_beside_the_tutorial(
    photographs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked.start_forks(monkeypatch)
    flags = ["--data", str(photographs), "--images", "64", "--epochs", "1", "--threads", "1"]
    content = measured(kd_speed, tmp_path / "speed.json", *flags)
    students = ["student ce", "student kd", "student cosine", "student hint"]
    phases = {
        "tutorial": {"teacher", *students, "all students", "teacher and students"},
        "ours": {"teacher", "all students", "of it storing outputs", "teacher and students"},
    }
    seconds = content["figures"]["s"]
    assert set(seconds) == {f"{side}, {name}" for side, names in phases.items() for name in names}
    assert set(content["figures"]["MiB"]) == {f"{side}, peak memory" for side in phases}
    assert all(figure > 0 for unit in content["figures"].values() for figure in unit.values())
    assert set(content["ratios"]) == {"teacher", "students", "total", "peak_mib"}
    assert content["ratios"]["students"] == pytest.approx(
        seconds["ours, all students"] / seconds["tutorial, all students"]
    )
    assert seconds["tutorial, all students"] == pytest.approx(sum(seconds[f"tutorial, {name}"] for name in students))
    assert content["threads"] == {"tutorial": 1, "ours": 1}
    assert [*content["accuracies"][0]] == ["teacher", *kd_speed.STUDENTS]
    assert content["wait_policy"]["ours"] == "PASSIVE"
    assert kd_speed.Pictures(str(photographs), 64).pixels.flags.c_contiguous  # PIL takes these without a copy
    assert content["hardware"]["cpu"]
    assert content["versions"]["torch"]
    printed = capfd.readouterr().out
    for words in ("all students", "peak memory", "1/8", *students):
        assert words in printed


@pytest.mark.slow
def test_local_sgd_is_compared_with_data_parallelism(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(local_sgd, tmp_path / "out.json", "--epochs", "1", "--periods", "1", "16")["rows"]
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
    steps = {"loop": [gpt_speed.loop(path, 22)], "bare": [gpt_speed.bare(path, 22)]}
    steps["ours"] = [gpt_speed.experiment("ours", path, 22)]
    assert min(steps.values()) > [0]
    data = gpt_speed.text(path)
    sizes = gpt_speed.BLOCK, gpt_speed.LAYERS, gpt_speed.HEADS, gpt_speed.WIDTH
    plain, ours = gpt_speed.PlainGPT(data.num_classes), gpt_speed.build_net(data, *sizes)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())
    x, y = gpt_speed.slices(gpt_speed.write_tokens(data, tmp_path))
    assert x.shape == y.shape == (12, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    every = steps | {"compiled": [1.0], "bfloat16": [1.0]}
    ratios = gpt_speed.ratios(every, gpt_speed.fetching(path, 1), {"recomputed": [3.0], "cached": [1.0]})
    assert set(ratios) == set(gpt_speed.TARGETS)
    assert min(ratios.values()) > [0]
    printed = common.table(Measurement({}, ratios), gpt_speed.TARGETS)
    assert "over the bare step" in printed
    assert "1/3.0" in printed
    assert "at most 1/3" in printed


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_int8_is_compared_with_float32(tmp_path: Path) -> None:
    run = Run(int8, tmp_path / "out.json", log=tmp_path / "log")
    run.wait()  # not faster on so few images, it ends with 1
    assert (tmp_path / "out.json").exists(), run.output
    content = json.loads((tmp_path / "out.json").read_text())
    speeds, sizes = (content["figures"][unit] for unit in ("images/s", "bytes"))
    assert content["ratios"]["speed"] == pytest.approx(speeds["int8"] / speeds["float32"])
    assert content["ratios"]["size"] == pytest.approx(sizes["int8"] / sizes["float32"])
    assert "images/s" in run.output


def int8(out: Path) -> None:
    """What it measures, of a net that is compiled quickly; of ResNet-20 the sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets, images = int8_speed.build_both(20, 2)
        sizes = {name: int8_speed.onnx_bytes(net, images) for name, net in nets.items()}
        assert sizes["int8"] <= 0.3 * sizes["float32"], sizes
        int8_speed.main(["--depth", "8", "--batch_size", "2", "--repeats", "1", "--out", str(out)])


def test_rings_and_comm_are_compared_with_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import comm_speed

    ratios = measured(comm_speed, tmp_path / "speed.json", "--quick")["ratios"]
    rings = {f"{name}, {n} processes" for name in ("ring", "ring_unchunked") for n in (2, 3)}
    assert set(ratios) == {*rings, "comm.py at 1,024 bytes"}
    assert all(ratio > 0 for ratio in ratios.values())
    printed = capsys.readouterr().out
    assert all(comm_speed.TARGETS[name].text in printed for name in ratios)
    assert not comm_speed.TARGETS["ring, 2 processes"].reached(2.1)
    assert not comm_speed.TARGETS["comm.py at 1,024 bytes"].reached(0.8)
    assert comm_speed.TARGETS["ring, 2 processes"].reached(1.9)
    assert comm_speed.TARGETS["ring_unchunked, 3 processes"].reached(9.0)


def test_pipelines_are_compared_with_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import pipeline_speed

    flags = ["--quick", "--schedules", "1F1B", "--num_microbatches", "4", "--balance", "2", "3"]
    content = measured(pipeline_speed, tmp_path / "speed.json", *flags)
    seconds, cost = content["figures"]["s a step (fits)"], content["figures"]["s a step (cost)"]
    assert set(seconds) == {"one", "one 8", "split", "1F1B 8", "1F1B 4", "halves", "plain"}
    best = min(seconds["1F1B 8"], seconds["1F1B 4"])
    assert content["ratios"] == pytest.approx({
        "split": seconds["one"] / seconds["split"],
        "bound": seconds["one 8"] / seconds["1F1B 8"] / (2 * 8 / 9),
        "whole": seconds["one"] / best,
        "plain": seconds["plain"] / best,
        "halves": best / seconds["halves"],
        "cost": cost["strategy"] / cost["bare"],
    })  # fmt: skip
    printed = capsys.readouterr().out
    for name, target in pipeline_speed.TARGETS.items():
        assert target.text in printed, name
    assert not pipeline_speed.TARGETS["plain"].reached(1.9)
    for name, ratio in {"plain": 2.1, "whole": 1.7, "cost": 1.01, "bound": 0.93}.items():
        assert pipeline_speed.TARGETS[name].reached(ratio)


def test_the_callback_of_hardware_py_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import hardware_speed

    monkeypatch.setattr(hardware_speed, "STEPS", 20)
    content = measured(hardware_speed, tmp_path / "speed.json", "--parts", "overhead", "--repeat", "1")
    assert content["ratios"]["overhead"] > 0
    assert "at most 1.05" in capsys.readouterr().out


def test_rpc_is_compared_with_ddp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import rpc_speed

    content = measured(rpc_speed, tmp_path / "out.json", "--quick", "--devices", "2")
    names = {f"LightNN, {name}" for name in ("ddp", "param_server")}
    batching = {f"{width}, {field}" for width in (128, 131_072) for field in ("waiting", "computing")}
    assert set(content["figures"]["ms a step"]) == names
    assert set(content["ratios"]) == names | batching
    assert content["ratios"]["LightNN, ddp"] == 1
    assert all(ratio > 0 for ratio in content["ratios"].values())
    assert "LightNN, param_server" in capsys.readouterr().out


def test_the_least_counts_one_forward_of_the_teacher() -> None:
    milliseconds = {zoo_speed.TEACHER: [4.0], "ce": [2.0], "kd": [7.0], "at": [9.0], zoo_speed.ALL: [15.0]}
    mib = {"ce": [1.0], "kd": [2.0], "at": [3.0], zoo_speed.ALL: [3.0]}
    ratios = zoo_speed.ratios(milliseconds, mib, ["ce", "kd", "at"], 2)
    # T 4, the students' steps 2, 3 and 5
    assert ratios == {
        "pass / runs": [15 / 18], "least / runs": [14 / 18], "pass / least": [pytest.approx(15 / 14)], "memory": [0.5]
    }  # fmt: skip


@pytest.mark.slow
def test_all_methods_are_timed_in_one_pass(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--repeat", "1", "--steps", "1", "--batch_size", "8", "--teacher", "8", "--only", "ce", "kd", "rkd", "vid"]
    content = measured(zoo_speed, tmp_path / "x.json", *flags)
    assert set(content["figures"]["ms"]) == {"teacher's forward", "ce", "kd", "rkd", "vid", "all in one pass"}
    assert "without deittoken: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_is_timed_beside_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked.start_forks(monkeypatch)
    flags = ["--repeat", "1", "--settings", "2", "--only", "kd", "--epochs", "1", "--steps", "1", "--teacher", "8"]
    content = measured(tune_speed, tmp_path / "x.json", *flags, "--batch_size", "200")
    assert content["ratios"].keys() == tune_speed.TARGETS.keys()
    seconds = content["figures"]["s"]
    assert content["ratios"]["together / alone"] == pytest.approx(seconds["together"] / seconds["alone"])
    # Two settings learn for an epoch of 461 images from one teacher.
    assert content["batches for which the teacher was not asked again"] == pytest.approx(461 / 200)


def test_a_figure_of_a_gpu_that_fails_costs_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(size: gpu.Size) -> gpu.Rows:
        """Two Rows."""
        yield "fails", lambda: {"ms": 1 / 0}
        yield "runs", lambda: {"ms": 2.0, "kernel": None}

    monkeypatch.setitem(gpu.PARTS, "precision", rows)
    gpu.measure("precision", gpu.Size("cpu", True), tmp_path / "rows")
    rows_written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert gpu.section("precision", rows_written, "stopped after 1 s").splitlines() == [
        "## precision: two rows", "",
        "|  | ms | kernel | why not |", "| :-- | --: | --: | --: |",
        "| fails | — | — | division by zero |", "| runs | 2.00 | — | — |", "",
        "Not all was measured: stopped after 1 s",
    ]  # fmt: skip
    python = sys.executable, "-c"
    assert gpu.run([*python, "print('why'); raise SystemExit(3)"], 60, dict(os.environ)) == "exit code 3: why"
    assert gpu.run([*python, "import time; time.sleep(60)"], 0.1, dict(os.environ)) == "stopped after 0.1 s"
    assert not gpu.run([*python, "pass"], 60, dict(os.environ))


def test_experiments_take_the_flags_of_a_gpus_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[str, ...]]] = []
    record = {"steps": [1.0] * 100, "peak_mib": 1.0}
    records = dict.fromkeys(("LitClassifier0", "Distillation0", "LitLanguageModel0"), record)
    monkeypatch.setattr(common, "run_clocked", lambda name, *flags, env: calls.append((name, flags)) or records)
    monkeypatch.setattr(gpu, "study", lambda name, *flags: calls.append((name, flags)) or [])
    for part in ("kd", "gpt", "strategies", "attention"):
        for quick in (False, True):
            for name, call in gpu.PARTS[part](gpu.Size("cpu", quick)):
                if ".py" in name:
                    assert all(value > 0 for value in call().values())
    assert Counter(name for name, _ in calls) == {"kd": 4, "gpt": 6, "hardware": 2, "attention": 2}
    for name, flags in calls:
        importlib.import_module(f"experiments.{name}").parser().parse(list(flags))


@pytest.mark.slow
def test_figures_of_a_gpu_can_be_had_of_a_cpu(tmp_path: Path) -> None:
    gpu.main(["--device", "cpu", "--quick", "--parts", "precision", "--out", str(tmp_path / "gpu.md")])
    written = (tmp_path / "gpu.md").read_text()
    assert "why not" not in written
    assert "Not all was measured" not in written
    assert len([line for line in written.splitlines() if line.startswith("| ")]) == 6  # 4 rows


@pytest.mark.slow
def test_rounding_is_measured_beside_seeds(tmp_path: Path) -> None:
    content = measured(rounding_spread, tmp_path / "out.json", "--quick", "--seeds", "2")
    one, two = content["processes x threads"].values()
    assert {*one} == {*two} == {"teacher", "ce", "kd"} == {*content["figures"]["by rounding"]}
    assert content["figures"]["between seeds"]["kd"] == pytest.approx(
        rounding_spread.pooled([one["kd"], two["kd"]]), abs=1e-9
    )
    pairs = [*zip(one["ce"], two["ce"], strict=True)]
    assert content["figures"]["by rounding, most"]["ce"] == max(abs(a - b) for a, b in pairs)
