"""The study of communication: what it measures and checks, what it refuses and what it keeps."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experiments import comm
from lab.strategies import ring
from lab.studies.comm import Backend, Bench, Case, all_cases
from lab.studies.comm.operations import OPERATIONS, Member
from lab.studies.comm.report import all_rows, binary_size, picture, table
from tests.commands import results, run_of
from tests.lab.studies import StudyTests, ends_by_a_signal, exit_code, rows
from tests.ranks import in_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--quick", "true", "--trainer.devices", "3"]
KEYS = {
    "name", "backend", "operation", "group", "ranks", "bytes", "correct", "seconds", "latency_us",
    "algorithm_gb_per_s", "bus_gb_per_s",
}  # fmt: skip
N = 3
BUS = {  # as nccl-tests' PERFORMANCE.md has it
    "send_recv": 1, "isend_irecv": 1, "broadcast": 1, "reduce": 1, "all_gather": (N - 1) / N,
    "reduce_scatter": (N - 1) / N, "all_to_all": (N - 1) / N, "scatter": (N - 1) / N, "gather": (N - 1) / N,
    **{f"all_reduce_{op}": 2 * (N - 1) / N for op in ("sum", "product", "max", "min")},
}  # fmt: skip


run = run_of(comm, *QUICK, "--sizes", "1024")


class TestStudy(StudyTests):
    script, bench = comm, Bench
    elsewhere = ({"cores": 1000, "gpus": ["GPU"]},)
    other = ("--trainer.devices", "2", "3, as the rows in")


def test_rows_are_all_operations_on_all_backends(run: Path) -> None:
    facts = results(run)["rows"]
    assert {(row["operation"], row["group"]) for row in facts if row["backend"] == "gloo"} == {
        (name, group) for name in [*BUS, "barrier"] for group in ("world", "sub-group")
    }
    kinds = {name: [row["operation"] for row in facts if row["backend"] == name] for name in ("ring", "ring_unchunked")}
    assert set(kinds["ring"]) == set(OPERATIONS)
    assert set(kinds["ring_unchunked"]) == {name for name in OPERATIONS if name.startswith("all_reduce")}
    page = (run / "results.md").read_text()
    assert all(f"| {name} | {group} | {backend} |" in page
               for backend in kinds for name in kinds[backend] for group in ("world", "sub-group"))  # fmt: skip


def test_rows_have_the_figures_that_nccl_tests_define(run: Path) -> None:
    for name, row in rows(run).items():
        assert set(row) == KEYS
        assert row["name"] == name
        assert row["correct"] is True
        assert row["ranks"] == (3 if row["group"] == "world" else 2)
        seconds = statistics.median(row["seconds"])
        assert len(row["seconds"]) == 2
        assert seconds > 0
        assert row["latency_us"] == pytest.approx(1e6 * seconds)
        if row["operation"] == "barrier":
            assert row["bytes"] == 0
            assert row["algorithm_gb_per_s"] is row["bus_gb_per_s"] is None
            continue
        assert row["bytes"] == (1032 if row["ranks"] == 3 else 1024)  # whole numbers for each of three ranks
        assert row["algorithm_gb_per_s"] == pytest.approx(row["bytes"] / seconds / 1e9)
        if row["group"] == "world":
            assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"] * BUS[row["operation"]])


def test_rows_for_more_cases_join_those_that_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick", "true", "--trainer.devices", "2", "--backends", "gloo"]
    comm.main([*flags, "--only", "broadcast", "--sizes", "1024", "--out", str(tmp_path)])
    before = results(tmp_path)["rows"]
    more = ["--only", "broadcast", "scatter", "--sizes", "64", "1024"]
    comm.main(["--out", str(tmp_path), "--resume", "true", *more])
    after = rows(tmp_path)
    assert [after[row["name"]] for row in before] == before
    assert {(row["operation"], row["bytes"]) for row in after.values()} == {
        (name, size) for name in ("broadcast", "scatter") for size in (64, 1024)
    }
    assert exit_code(comm, "--out", str(tmp_path), "--resume", "true", "--sizes", "64")
    assert "--sizes 64: expected [64, 1024] or more, as the run in" in capsys.readouterr().err


# What goes wrong


def wrong(member: Member, *_: torch.Tensor) -> Callable[[], object]:
    """An all-reduce that forgets to reduce."""
    return lambda: dist.barrier(member.group)


def dies(member: Member, x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    if member.rank == 1:
        os._exit(3)
    return OPERATIONS["all_reduce_sum"].bind(member, x, y)


ONLY = ["--sizes", "64", "--repeats", "1", "--trainer.devices", "2", "--backends", "gloo"]


def test_a_wrong_result_and_a_row_that_fails_cost_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, bind in (("broadcast", wrong), ("reduce", dies)):
        monkeypatch.setitem(OPERATIONS, name, replace(OPERATIONS["all_reduce_sum"], bind=bind))
    assert exit_code(comm, *ONLY, "--only", "send_recv", "broadcast", "reduce", "gather", "--out", str(tmp_path)) == 1
    correct = {(row["operation"], row["group"]): row["correct"] for row in results(tmp_path)["rows"]}
    assert correct == {
        (name, group): name != "broadcast"
        for name in ("send_recv", "broadcast", "gather")
        for group in ("world", "sub-group")
    }
    printed = capfd.readouterr()
    assert "gloo broadcast, world, 64 B: the result is WRONG." in printed.out
    failed = [line for line in printed.err.splitlines() if " failed: " in line]
    assert [line.partition(":")[0] for line in failed] == [
        "gloo reduce, world, 64 B failed", "gloo reduce, sub-group, 64 B failed",
    ]  # fmt: skip
    assert "gloo reduce, world, 64 B: failed: " in (tmp_path / "results.md").read_text()


def test_a_backend_that_does_not_start_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comm.ring, "register", lambda: os._exit(3))
    assert exit_code(comm, *ONLY, "--only", "broadcast", "gather", "--out", str(tmp_path))
    failed = [line for line in capfd.readouterr().err.splitlines() if " failed: " in line]
    assert len(failed) == 1
    assert failed[0].startswith("gloo broadcast, world, 64 B and 3 more failed: rank ")
    assert failed[0].endswith(" ended with exit code 3")


def slow(flags: list[str]) -> None:
    OPERATIONS["gather"] = replace(OPERATIONS["gather"], bind=lambda *_: lambda: time.sleep(60))
    comm.main(flags)


def test_a_signal_ends_the_run_and_keeps_its_rows(tmp_path: Path) -> None:
    kept = {"gloo scatter, world, 64 B", "gloo scatter, sub-group, 64 B"}
    ends_by_a_signal(slow, [*ONLY, "--only", "scatter", "gather"], tmp_path, kept)


# Its parts


@in_ranks(3)
def test_a_wrong_number_would_be_seen() -> None:
    group = dist.new_group([1, 2])
    for members, torchs in (((0, 1, 2), dist.group.WORLD), ((1, 2), group)):
        if dist.get_rank() not in members:
            continue
        member = Member(torchs, members, members.index(dist.get_rank()), torch.device("cpu"))
        for name, operation in OPERATIONS.items():
            x, y = operation.tensors(member, 12 if operation.sends else 0)
            operation.bind(member, x, y)()
            assert operation.is_correct(member, x, y), name
            if operation.receives(member):
                y[-1] += 1
                assert not operation.is_correct(member, x, y), name


def test_rows_of_any_number_of_ranks() -> None:
    gloo, whole = Backend("gloo"), Backend(ring.UNCHUNKED, only_all_reduce=True)
    cases = all_cases(5, [gloo, whole], ["all_reduce_max", "gather", "barrier"], [1, 2, 4096])
    names = [row.name for row in cases]
    assert len(set(names)) == len(names)
    assert names[:4] == [
        "gloo all_reduce_max, world, 20 B", "gloo all_reduce_max, world, 4,100 B",
        "gloo all_reduce_max, sub-group, 16 B", "gloo all_reduce_max, sub-group, 4,096 B",
    ]  # fmt: skip
    assert all(row.count % len(row.ranks) == 0 for row in cases)
    assert {row.ranks for row in cases} == {(0, 1, 2, 3, 4), (0, 1, 2, 3)}
    assert {row.operation for row in cases if row.backend == whole} == {"all_reduce_max"}
    assert {row.ranks for row in all_cases(2, [gloo], None, [64]) if row.group == "sub-group"} == {(0, 1)}
    assert [binary_size(size) for size in (8, 1024, 1032, 2**26, 2**20 + 4)] == ["8 B", "1 KB", "1 KB", "64 MB", "1 MB"]


@pytest.mark.drawn
def test_a_table_compares_with_gloo() -> None:
    def fact(backend: str, size: int, latency: float) -> dict[str, Any]:
        row = Case(Backend(backend), "broadcast", "world", (0, 1), size // 4)
        rest = {"operation": "broadcast", "group": "world", "bytes": size, "algorithm_gb_per_s": size / latency / 1e3}
        return {
            "name": row.name,
            "backend": backend,
            **rest,
            "latency_us": latency,
            "bus_gb_per_s": size / latency / 1e3,
        }

    facts = [fact("gloo", 1024, 10), fact("gloo", 2**20, 400), fact("ring", 1024, 20), fact("ring", 2**20, 600)]
    compared = table(facts)
    assert compared.header == ["operation", "group", "µs: gloo", "ring", "GB/s: gloo", "ring"]
    assert compared.rows == [["broadcast", "world", "10.0", "20.0", "2.62", "1.75"]]
    assert [line[-1] for line in all_rows(facts).rows] == ["—", "—", "2.00 x", "1.50 x"]
    assert table([]).rows == []
    assert picture([]).startswith(b"\x89PNG")
