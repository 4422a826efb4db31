"""The study of attention: what it measures and tells, what it refuses and what it keeps."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import attention
from lab.studies.attention import Bench, Case, measure
from lab.studies.meters import LINUX
from lit_modules.nets import SelfAttention
from tests.commands import left_by_overwriting, results, run_of
from tests.lab.studies import StudyTests, ends_by_a_signal, exit_code, rows

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--quick", "true", "--device", "cpu"]
CPU = torch.device("cpu")
NO_COMPILER = shutil.which("g++") is None


run = run_of(attention, *QUICK, "--parts", "kernels")


class TestStudy(StudyTests):
    script, bench, keys = attention, Bench, frozenset({"peak"})
    pictures = ("kernels.png",)
    elsewhere = ({"cpu": "Another", "threads": 2}, {"gpus": ["Another"], "device": "cuda"})
    other = ("--heads", "4", "2, as the run in")


def test_rows_are_all_kernels_and_products(run: Path) -> None:
    content = results(run)
    assert (content["hardware"]["device"], content["hardware"]["threads"]) == ("cpu", 1)
    before, *measured, after = content["rows"]
    assert [row["name"] for row in (before, after)] == [
        "matmul: float32, before kernels", "matmul: float32, at the end",
    ]  # fmt: skip
    peak = max(row["tflops_per_second"] for row in (before, after))
    assert content["peak"]["tflops_per_second"] == {"float32": peak}
    assert "products of two square matrices" in content["peak"]["is"]
    assert [row["name"] for row in measured] == [
        f"kernels: {backend}, float32, {batch} x {length}, {direction}"
        for direction in ("forward", "forward + backward")
        for batch, length in ((4, 16), (2, 32))
        for backend in ("auto", "math", "flash", "efficient", "cudnn", "flex")
    ]
    for row in content["rows"]:
        if row.get("backend") in {"efficient", "cudnn"}:
            assert "No viable backend" in row["refused"]
            assert "microseconds" not in row
            continue
        if row.get("backend") == "flex" and row["backward"]:
            assert row["refused"] == "another kernel to train: on a CPU flex has no gradients"
            continue
        seconds = row["microseconds"] / 1e6
        assert row["tflops_per_second"] == pytest.approx(counted(row) / seconds / 1e12)
        assert row["share_of_peak"] == pytest.approx(row["tflops_per_second"] / peak)
        assert row["times"] >= 5
        assert row["iqr_microseconds"] > 0
    for row in measured:
        assert row.get("kernel", row["backend"]) == {"auto": "flash"}.get(row["backend"], row["backend"])
    page = (run / "results.md").read_text()
    for row in measured:
        assert (f"| {row['name']} |" in page) == (row["refused"] is None)
    assert "Not run: kernels: efficient and kernels: cudnn in float32, 8 rows: No viable backend" in page


def counted(row: dict[str, Any]) -> float:
    """Products and sums, one by one.

    Of two matrices; of attention q kᵀ and weights v, and 2.5 times that backward; of a block's four matrices.
    """
    if row["part"] == "matmul":
        return 2 * row["matrix"] ** 3
    width, lengths = row["heads"] * row["head_dim"], row["lengths"] or [row["length"]] * row["batch"]
    pairs = sum(length**2 for length in lengths) / (2 if row["causal"] else 1)
    projections = 4 * 2 * sum(lengths) * width**2 if row["block"] else 0
    return pairs * width * 2 * 2 * (3.5 if row["backward"] else 1) + projections * (3 if row["backward"] else 1)


def test_threads_are_those_that_torch_has(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    torch.set_num_threads(2)  # starts none
    assert exit_code(attention, "--out", str(copy), "--resume", "true") == 2
    torch.set_num_threads(1)
    assert "measured: threads 1, not 2; or take another --out" in capsys.readouterr().err


def test_the_peak_is_the_best_of_all_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = iter([2.0, 5.0, 3.0])

    def products(_bench: Bench, name: str, dtype: str) -> dict[str, Any]:
        facts = {"name": name, "part": "matmul", "dtype": dtype, "refused": None}
        return {**facts, "tflops_per_second": next(reached), "matrix": 4}

    monkeypatch.setattr(Bench, "products", products)
    flags = ["--parts", "kernels", "blocks", "--longest", "1e-12", "--lengths", "16", "--backends", "math"]
    attention.main([*QUICK, *flags, "--out", str(tmp_path)])
    content = results(tmp_path)
    assert content["peak"]["tflops_per_second"] == {"float32": 5}
    assert all(row["share_of_peak"] == row["tflops_per_second"] / 5 for row in content["rows"])
    assert "5.00 in float32 (4 x 4, the best of 3 from 2.00 on)" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler")
def test_blocks_dense_and_jagged_eager_and_compiled(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    attention.main([*QUICK, "--parts", "blocks", "profile", "--out", str(tmp_path)])
    by_name = rows(tmp_path)
    for direction in ("forward", "forward + backward"):
        for layout in ("dense", "jagged"):
            for mode in ("eager", "compiled"):
                row = by_name[f"blocks: {layout} {mode}, float32, 2 x 32, {direction}"]
                assert row["lengths"] == (None if layout == "dense" else [1, 32])
                assert (row["refused"], row["kernel"]) == (None, "flash" if layout == "dense" else "math")
                assert row["tflops_per_second"] == pytest.approx(counted(row) / row["microseconds"] / 1e6)
                assert row["peak_bytes"] < 2**22  # the compiler takes some 2**27
    for mode in ("eager", "compiled"):
        row = by_name[f"profile: dense {mode}, float32, 2 x 16, forward"]
        assert len(row["operators"]) <= 10
        shares = [operator["share"] for operator in row["operators"]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1 + 1e-9
        assert any("flash_attention" in operator["operator"] for operator in row["operators"])
        trace = json.loads((tmp_path / f"trace_{mode}.json").read_text())
        assert sum("flash_attention_for_cpu" in event.get("name", "") for event in trace["traceEvents"]) >= 25
    page = (tmp_path / "results.md").read_text()
    assert page.count("operators that take longest") == 2
    assert (tmp_path / "blocks.png").stat().st_size > 0
    assert not left_by_overwriting(tmp_path, tmp_path_factory.mktemp("copy"))


# What goes wrong


ONLY = [*QUICK, "--parts", "kernels", "--lengths", "16"]


def with_math(monkeypatch: pytest.MonkeyPatch, instead: Callable[[], object]) -> None:
    """Rows of the math kernel do something else."""
    whole = Bench._measure_call

    def row(self: Bench, row: Case, folder: Path) -> Any:
        return instead() if row.backend == "math" else whole(self, row, folder)

    monkeypatch.setattr(Bench, "_measure_call", row)


def test_a_row_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_math(monkeypatch, lambda: os._exit(3))
    assert exit_code(attention, *ONLY, "--out", str(tmp_path)) == 1
    assert {row["backend"] for row in rows(tmp_path).values() if row["part"] == "kernels"} == {
        "auto", "flash", "efficient", "cudnn", "flex",
    }  # fmt: skip
    name = "kernels: math, float32, 4 x 16, forward"
    assert f"{name} failed: " in capfd.readouterr().err
    assert f"{name}; {name} + backward: failed: " in (tmp_path / "results.md").read_text()


def test_blocks_that_take_too_long_are_left_out_and_an_old_run_s_files_are_gone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(run, tmp_path / "run")
    flags = ["--parts", "blocks", "--longest", "1e-12", "--overwrite", "true"]
    attention.main([*QUICK, *flags, "--out", str(out)])
    assert list(rows(out)) == ["matmul: float32, before blocks", "matmul: float32, at the end"]
    assert {path.name for path in out.iterdir() if path.suffix} == {
        "config.yaml", "environment.json", "report.html", "results.json", "results.md",
    }  # fmt: skip
    assert "attention.py " in (out / "report.html").read_text().partition("The command that repeats it")[2]
    printed = " ".join(capsys.readouterr().out.split())
    assert "blocks: jagged compiled, float32, 2 x 32, forward + backward: left out: at its best" in printed
    assert "--longest, 1e-12 s." in printed


def test_too_little_memory_is_torchs_refusal() -> None:
    bench = Bench(CPU, 0.001, 1)
    fits, large = (Case("kernels", "float32", 1, length, 4, 1, backend="math") for length in (256, 2**22))
    assert bench.measure(fits, Path())["refused"] is None
    refused = bench.measure(large, Path())["refused"]  # 256 TiB of weights, more than a process can address
    assert "can't allocate memory: you tried to allocate" in refused


class GreedyAtFirst(SelfAttention):
    """Takes 256 MB in its first call, as a compiler does."""

    greedy = True

    def forward(self, *args: Any) -> torch.Tensor:
        if self.greedy:
            torch.ones(2**26)
            self.greedy = False
        return super().forward(*args)


@pytest.mark.skipif(not LINUX, reason="only there memory on a CPU can be told")
def test_peak_memory_is_that_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SelfAttention", GreedyAtFirst)
    bench = Bench(CPU, 0.001, 1)
    math, flash = (Case("kernels", "float32", 1, 1024, 4, 8, backend=backend) for backend in ("math", "flash"))
    assert 2**24 <= bench.measure(math, Path())["peak_bytes"] <= 2**27  # 16 MiB a tensor of weights
    assert 2**17 <= bench.measure(flash, Path())["peak_bytes"] <= 2**22  # 128 KiB come out
    block = Case("blocks", "float32", 1, 8, 2, 4, block=True)
    assert bench.measure(block, Path())["peak_bytes"] <= 2**22


@pytest.mark.parametrize(("slow", "times"), [(1.0, 5), (0.001, 3)])
def test_a_call_is_timed_several_times(slow: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SLOW", slow)
    facts = Bench(CPU, 0.001, 1)._time(lambda: time.sleep(0.01), 1.0)
    assert times <= facts["times"] < times + 2


def slow(flags: list[str]) -> None:
    with_math(pytest.MonkeyPatch(), lambda: time.sleep(60))
    attention.main(flags)


def test_a_signal_ends_the_run_and_keeps_its_rows(tmp_path: Path) -> None:
    kept = {"matmul: float32, before kernels", "kernels: auto, float32, 4 x 16, forward"}
    ends_by_a_signal(slow, ONLY, tmp_path, kept)
