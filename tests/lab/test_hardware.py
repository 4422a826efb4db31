"""The comparison of strategies: what it measures, what it refuses, and that no row costs another."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from apprentice.errors import BadInput
from experiments import hardware
from harness.cli.messages import one_line
from lab.studies.hardware import Bench
from lab.studies.hardware.cases import Cases
from lab.studies.hardware.measure import Phases, difference
from lab.studies.hardware.report import report, table
from lab.studies.isolation import call_isolated
from lab.studies.meters import PeakMemory, hidden_share, sent_bytes, state_bytes
from lit_modules.nets import ViT
from strategies import DDP
from tests.commands import results, run_of
from tests.lab.studies import StudyTests, ends_by_a_signal, exit_code, rows
from tests.training import classifier, net

QUICK = ["--data.batch_size", "8", "--data.train_size", "20", "--data.validation_size", "0", "--steps", "4"]
LIGHT = [*QUICK, "--net", "LightNN"]
COLUMNS = {
    "strategy", "devices", "exact", "images_per_second", "speedup", "state_bytes_per_rank", "bytes_sent_per_step",
    "first_difference", "max_difference", "peak_memory_per_rank", "hidden_share", "step_ms", "threads_per_rank",
}  # fmt: skip
DEEP = 4 * 201_642  # bytes of DeepNN's parameters for 1 x 8 x 8
LITTLE = 3_000  # bytes a step of Lightning's flags and of logged means
pytestmark = pytest.mark.usefixtures("one_thread")


STRATEGIES = ["ddp", "ddp_zero1", "fsdp", "local_sgd", "ddp_fp16", "ddp-exact", "ddp_zero1-exact"]
run = run_of(hardware, *QUICK, "--trainer.devices", "2", "--exact", "3", "--only", *STRATEGIES)


class TestStudy(StudyTests):
    script, bench = hardware, Bench
    elsewhere = ({"threads": 7},)
    other = ("--trainer.devices", "3", "2, as the rows in")


def test_rows_are_what_was_asked_for(run: Path) -> None:
    content = results(run)
    assert content["hardware"]["cores"] == os.cpu_count()
    assert torch.__version__.startswith(content["versions"]["torch"])
    assert content["config"]["trainer"]["devices"] == 2
    names = [row["strategy"] for row in content["rows"]]
    assert names[0] == "single"
    assert set(names[1:]) == set(content["config"]["only"])
    for row in content["rows"]:
        assert set(row) == COLUMNS
        assert row["devices"] == len(row["state_bytes_per_rank"]) == (1 if row["strategy"] == "single" else 2)
        assert row["exact"] == (3 if row["strategy"].endswith("-exact") else None)
        assert row["images_per_second"] == pytest.approx(8 / row["step_ms"] * 1e3)
        assert row["speedup"] == pytest.approx(row["images_per_second"] / content["rows"][0]["images_per_second"])
        assert row["threads_per_rank"] == 1
    page = (run / "results.md").read_text()
    assert all(f"| {name} |" in page for name in names)


def test_state_is_what_a_rank_holds(run: Path) -> None:
    held = {name: row["state_bytes_per_rank"] for name, row in rows(run).items()}
    whole = 4 * DEEP  # parameters, gradients, Adam's two moments; its step counts are 4 bytes a parameter tensor
    assert held["single"] == [whole + 12 * 4]
    for name in ("ddp", "local_sgd", "ddp_fp16", "ddp-exact"):
        assert held[name] == [whole + 12 * 4] * 2, name
    assert sum(held["fsdp"]) == pytest.approx(whole, rel=1e-3)
    assert max(held["fsdp"]) < 0.55 * whole
    assert sum(held["ddp_zero1"]) == 2 * 2 * DEEP + 2 * DEEP + 12 * 4
    assert max(held["ddp_zero1"]) < 0.8 * whole
    assert held["ddp_zero1-exact"] == held["ddp_zero1"]
    for name, row in rows(run).items():
        assert all(peak > min(held[name]) / 2 for peak in row["peak_memory_per_rank"]), name


def test_bytes_are_those_that_were_sent(run: Path) -> None:
    sent = {name: row["bytes_sent_per_step"] for name, row in rows(run).items()}
    assert sent["single"] == 0
    assert sent["ddp"] == pytest.approx(DEEP, abs=LITTLE)  # 2 (n - 1) / n of the gradients
    assert sent["ddp_fp16"] == pytest.approx(DEEP / 2, abs=LITTLE)
    assert sent["local_sgd"] == pytest.approx(DEEP / 4, abs=LITTLE)  # it averages every fourth step
    assert sent["ddp-exact"] == pytest.approx(2 * DEEP, abs=LITTLE)  # one float64 sum a number
    assert sent["ddp_zero1"] == pytest.approx(1.5 * DEEP, rel=0.02)  # and half of the parameters from each rank


def test_differences_tell_the_exact_from_the_rest(run: Path) -> None:
    for key in ("first_difference", "max_difference"):
        differences = {name: row[key] for name, row in rows(run).items()}
        assert differences["single"] == differences["ddp-exact"] == differences["ddp_zero1-exact"] == 0
        for name in ("ddp", "ddp_zero1", "fsdp"):
            assert differences[name] <= 1e-9, name
        for name in ("ddp_fp16", "local_sgd"):
            assert 1e-6 < differences[name] < 1, name


def test_shares_are_shares(run: Path) -> None:
    for name, row in rows(run).items():
        assert row["hidden_share"] is None if name == "single" else 0 <= row["hidden_share"] <= 1, name


@pytest.mark.slow
def test_powersgd_sends_far_less_and_rpc_is_not_counted(tmp_path: Path) -> None:
    only = ["--only", "ddp", "ddp_powersgd", "param_server", "--trainer.devices", "2"]
    hardware.main([*LIGHT, *only, "--out", str(tmp_path / "run")])
    by_name = rows(tmp_path / "run")
    assert by_name["param_server"]["bytes_sent_per_step"] is by_name["param_server"]["hidden_share"] is None
    assert by_name["ddp_powersgd"]["bytes_sent_per_step"] < by_name["ddp"]["bytes_sent_per_step"] / 5
    assert 1e-9 < by_name["ddp_powersgd"]["max_difference"] < 1


@pytest.mark.slow
def test_one_device_and_options_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--trainer.devices", "1", "--trainer.accumulate_grad_batches", "2", "--trainer.strategy", "local_sgd",
        "--trainer.strategy.period", "2", "--only", "ddp", "local_sgd", "fsdp", "ddp-exact",
    ]  # fmt: skip
    hardware.main([*LIGHT, *flags, "--out", str(tmp_path / "run")])
    by_name = rows(tmp_path / "run")
    assert all(row["devices"] == 1 and row["hidden_share"] is None for row in by_name.values())
    assert all(row["bytes_sent_per_step"] < LITTLE for row in by_name.values())
    assert all(row["max_difference"] <= 1e-12 for row in by_name.values())
    assert by_name["ddp-exact"] == {**by_name["ddp-exact"], "exact": 8, "max_difference": 0}
    assert "0 bits" in capsys.readouterr().out


class Dies(DDP):
    """Rank 1 ends without a word."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.global_rank == 1:
            os._exit(3)
        return super().training_step(*args, **kwargs)


def test_a_row_that_fails_costs_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name, out = "tests.lab.test_hardware.Dies", tmp_path / "run"
    flags = [*LIGHT, "--trainer.strategy", name, "--trainer.devices", "2", "--only", "ddp", name, "--out", str(out)]
    assert exit_code(hardware, *flags) == 1
    assert set(rows(out)) == {"single", "ddp"}
    printed = capfd.readouterr()
    assert "tests.lab.test_hardware.Dies failed: rank 1 ended with exit code 3\n" in printed.err
    assert "exit code 3" in (out / "results.md").read_text()


def test_a_net_that_cannot_be_trained_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--optimizer", "SGD", "--optimizer.lr", "1e30", "--only", "ddp", "--out", str(tmp_path / "run")]
    assert exit_code(hardware, *LIGHT, *flags) == 2
    assert "not finite" in capsys.readouterr().err


def test_a_signal_ends_the_run_and_keeps_its_rows(tmp_path: Path) -> None:
    flags = [*LIGHT, "--trainer.devices", "2", "--only", "ddp", "ddp_zero1", "--steps", "100000"]
    ends_by_a_signal(_slow_after_single, flags, tmp_path, {"single"}, prints="in the second row")


def _slow_after_single(flags: list[str]) -> None:
    measure = Bench.measure

    def measured(self: Bench, row: Any) -> Any:
        if row.name == "single":
            self.steps = 4
            facts = measure(self, row)
            self.steps = 100_000
            return facts
        print("in the second row", flush=True)
        return measure(self, row)

    Bench.measure = measured  # type: ignore[method-assign]
    hardware.main(flags)


# Its parts


def test_a_strategy_is_timed_in_whole_periods() -> None:
    assert Phases.of({}, steps=24) == (4, 1, 24, 3)
    assert Phases.of({"period": 16, "warmup_steps": 5}, steps=24) == (9, 16, 3, 3)
    assert Phases.of({"start_step": 10}, steps=24, accumulate=2) == (28, 2, 24, 6)
    assert Phases.of({"period": 4}, steps=24).batches == 4 + 24 + 3


def test_rows_are_all_strategies_that_fit() -> None:
    command = hardware.parser()
    config = command.parse(["--trainer.devices", "4"])
    cases, skipped = Cases(config.trainer, config.exact).pick(None)
    names = [row.name for row in cases]
    assert set(names) >= {"single", "ddp", "ddp_zero1", "fsdp", "hsdp", "local_sgd", "ddp_fp16", "ddp_powersgd"}
    assert {"ddp-exact", "ddp_zero1-exact", "pipeline", "model_parallel", "pipeline-exact"} <= set(names)
    assert not {"ddp_fork", "ddp_spawn", "fsdp-exact"} & set(names)
    assert set(skipped) == {"model_parallel-exact"}  # which has one micro-batch
    assert {row.exact for row in cases} == {None, 8}
    assert {row.options["timeout"] for row in cases if row.options} == {300.0}  # a rank that hangs costs no half hour


def test_a_net_that_has_no_plan_is_not_computed_by_several_ranks() -> None:
    config = hardware.parser().parse(["--trainer.devices", "4"])
    cases = Cases(config.trainer, config.exact)
    picked, _ = cases.pick(None)
    left, unsuited = cases.pick_for_module(picked, classifier(), None)
    assert [*unsuited] == ["tensor_parallel"] == [case.name for case in picked if case not in left]
    assert "expected a net with tensor_parallel_plan()" in unsuited["tensor_parallel"]
    assert cases.pick_for_module(picked, classifier(ViT), ["tensor_parallel"]) == (picked, {})
    with pytest.raises(BadInput, match="only tensor_parallel: expected a strategy that can train this net: mesh"):
        cases.pick_for_module(picked, classifier(), ["tensor_parallel"])


@pytest.mark.filterwarnings("ignore:You passed .*precision='16-mixed':UserWarning")  # it is another on CPU
def test_the_scaled_precision_leaves_exact_rows_out() -> None:
    config = hardware.parser().parse(["--trainer.devices", "2", "--trainer.precision", "16-mixed"])
    _, skipped = Cases(config.trainer, config.exact).pick(None)
    assert "16-mixed" in skipped["ddp-exact"]


def test_hidden_is_the_time_in_both() -> None:
    assert hidden_share([(0, 10)], [(2, 4), (3, 5), (9, 20)]) == 0.4
    assert hidden_share([(0, 4), (2, 10), (20, 30)], [(-5, 40)]) == 1
    assert hidden_share([(0, 1)], [(1, 2)]) == 0
    assert hidden_share([], [(0, 1)]) is None


def test_differences() -> None:
    ones = {"a": torch.ones(3), "n": torch.tensor(3)}
    assert difference(ones, ones) == difference(ones, ones, in_bits=True) == 0
    other = {"a": torch.tensor([1.0, 1.5, 1.0]), "n": torch.tensor(3)}
    assert difference(ones, other) == 0.5
    assert difference(ones, other, in_bits=True) == 1  # the first of the fraction
    assert difference({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}, in_bits=True) == 1
    assert difference(ones, {**ones, "a": torch.tensor([1.0, torch.nan, 5.0])}) != 0
    with pytest.raises(ValueError, match="one net"):
        difference(ones, {"a": torch.ones(3)})


def test_sent_bytes_are_counted_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent_bytes() == 0  # no one to talk to
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            before = sent_bytes()
            near.sendall(b"x" * 5000)
            received = 0
            while received < 5000:
                received += len(far.recv(5000))
            deadline = time.monotonic() + 5
            while (sent := sent_bytes() or 0) - (before or 0) < 5000 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert sent - (before or 0) == 5000
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    assert sent_bytes() is None


def test_peak_memory_is_what_was_held_at_once() -> None:
    held = torch.ones(2**22)  # what was there before does not count
    meter = PeakMemory(torch.device("cpu"))
    torch.ones(2**24)  # 64 MiB, let go at once
    growth = meter.bytes()
    assert growth is not None
    assert 0.95 * 2**26 < growth < 1.1 * 2**26
    assert len(held)


def test_state_bytes_count_each_tensor() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    size = 4 * sum(p.numel() for p in module.parameters())
    assert state_bytes(module, [optimizer]) == size
    module(torch.zeros(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    assert state_bytes(module, [optimizer]) == 3 * size


def test_what_was_not_measured_is_told_apart_from_nothing() -> None:
    row: Any = {
        "strategy": "fsdp", "devices": 2, "exact": None, "images_per_second": 1234.5, "speedup": 1.9,
        "state_bytes_per_rank": [2**20, 2**21], "peak_memory_per_rank": [None, None], "bytes_sent_per_step": None,
        "hidden_share": None, "first_difference": 0.0, "max_difference": None, "threads_per_rank": 1,
    }  # fmt: skip
    cells = table([row]).rows[0]
    assert cells == ["fsdp", "2", "1,234", "1.90", "2", "—", "—", "—", "0", "not finite"]
    config = {"net": {"class_path": "my.Net"}, "data": {"class_path": "my.Data"}}
    rows: Any = [{**row, "strategy": "single", "threads_per_rank": 2}, row]
    header: Any = {"config": config, "hardware": {}, "versions": {}, "free": []}
    page = report(header, rows, {"hsdp": "no"}).markdown("hardware")
    assert "Net on Data" in page
    assert "single 2, fsdp 1" in page
    assert "hsdp: no." in page


def test_an_error_in_a_process_of_its_own_is_the_cause() -> None:
    def refuse() -> None:
        raise BadInput("callbacks", 1, "a logger beside it")

    with pytest.raises(ProcessRaisedException) as caught:
        call_isolated(refuse, threads=1)
    assert one_line(caught.value) == "--callbacks 1: expected a logger beside it"
