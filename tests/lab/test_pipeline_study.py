"""The study of pipelines: what it measures, draws and recommends, what it refuses and what it keeps."""

import copy
import itertools
import json
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments import pipeline
from harness.runs.quiet import quiet
from lab.studies.pipeline import Bench, Case, Cases, Cut, Noise, Task
from lab.studies.pipeline.cases import bubble_bound
from lab.studies.pipeline.measure import Event
from lab.studies.pipeline.report import idle_share, table
from tests.commands import results, run_of
from tests.lab.studies import StudyTests, ends_by_a_signal, exit_code, rows
from tests.training import trainer

NET = ["--net", "ResNet", "--net.depth", "8", "--cut_after", "stage1", "--trainer.devices", "2"]
QUICK = ["--quick", "true", *NET]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
COLUMNS = {
    "name", "schedule", "num_microbatches", "seconds_per_step", "speedup", "bubble_bound", "share_of_bound",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


run = run_of(pipeline, *QUICK)


class TestStudy(StudyTests):
    script, bench = pipeline, Bench
    pictures = ("results.png", "timeline.png")
    elsewhere = ({"cpu": "Another"},)
    other = ("--trainer.devices", "3", "2, as the rows in")


def test_rows_are_one_device_splits_and_all_schedules(run: Path) -> None:
    content = results(run)
    assert content["config"]["split_sizes"] == [2, 4]
    names = [row["name"] for row in content["rows"]]
    assert names[:7] == [
        "one device", "one device, split size 2", "one device, split size 4", "split after stage1", "split by time",
        "1F1B after stage1, split size 2", "1F1B after stage1, split size 4",
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    best = min(content["rows"][5:9], key=lambda row: statistics.mean(row["seconds_per_step"]))["name"][-1]
    for schedule in SCHEDULES:
        size = "2" if schedule == "DualPipeV" else best  # it needs four micro-batches
        assert f"{schedule} by time, split size {size}" in names
    page = (run / "results.md").read_text()
    assert all(f"| {name} |" in page for name in names)
    assert all(figure in page for figure in ("3.75", "4.02", "2.51", "2.43"))


def test_rows_have_the_figures_that_their_seconds_give(run: Path) -> None:
    by_name = rows(run)
    one = statistics.mean(by_name["one device"]["seconds_per_step"])
    for name, row in by_name.items():
        assert set(row) == COLUMNS
        assert len(row["seconds_per_step"]) == 2
        assert min(row["seconds_per_step"]) > 0
        assert row["speedup"] == pytest.approx(one / statistics.mean(row["seconds_per_step"]))
        assert (row["schedule"] is None) == name.startswith("one device")
        if row["schedule"] in {"GPipe", "1F1B"}:
            m = row["num_microbatches"]
            assert row["bubble_bound"] == pytest.approx(2 * m / (m + 1))
            assert row["share_of_bound"] == pytest.approx(row["speedup"] / row["bubble_bound"])
        else:
            assert row["bubble_bound"] is row["share_of_bound"] is None
    assert by_name["split by time"] == {**by_name["split by time"], "schedule": "GPipe", "num_microbatches": 1}
    for size, count in ((2, 4), (4, 2)):
        for start in ("one device", "1F1B after stage1", "1F1B by time"):
            assert by_name[f"{start}, split size {size}"]["num_microbatches"] == count


def test_the_timeline_is_one_of_a_pipeline(run: Path) -> None:
    by_name = rows(run)
    kept = json.loads((run / "timelines.json").read_text())
    assert set(kept) == {name for name, row in by_name.items() if row["schedule"] is not None}
    for name, timeline in kept.items():
        count, stages = by_name[name]["num_microbatches"], len(timeline["sizes"])
        assert sum(timeline["sizes"]) == 5
        assert stages == (2 if by_name[name]["bubble_bound"] else 4)
        spans = {(stage, number, kind): (start, stop) for _, stage, number, kind, start, stop in timeline["events"]}
        assert min(start for start, _ in spans.values()) == 0
        for stage in range(stages):
            for number in range(count):
                start, stop = spans[stage, number, "forward"]
                assert 0 <= start < stop <= spans[stage, number, "backward"][0]
                if stage:  # the clocks of both ranks are one
                    assert start >= spans[stage - 1, number, "forward"][1]
                    assert spans[stage - 1, number, "backward"][1] > spans[stage, number, "backward"][1]
        for rank in (0, 1):
            mine = sorted(event[4:] for event in timeline["events"] if event[0] == rank)
            assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(mine))
    assert kept["split after stage1"]["sizes"] == [2, 3]
    events = [Event(*event) for event in kept["split after stage1"]["events"]]
    assert idle_share(events) >= 0.5 - 1e-6  # one computes at a time


def test_it_ends_with_what_to_take(run: Path) -> None:
    by_name = rows(run)
    candidates = {name: row for name, row in by_name.items() if row["schedule"] and not name.startswith("split")}
    best = min(candidates, key=lambda name: statistics.mean(candidates[name]["seconds_per_step"]))
    page = (run / "results.md").read_text()
    text = " ".join(page.split())  # lines break where the names of rows let them
    assert f"Recommended on this machine: {best}, " in text
    code = page.rpartition("```python\n")[2].partition("\n")[0]
    sizes = json.loads((run / "timelines.json").read_text())[best]["sizes"]
    expected = f"schedule={by_name[best]['schedule']!r}, num_microbatches={by_name[best]['num_microbatches']}"
    assert code == f"PipelineStrategy({expected}, balance={sizes})"
    flags = page.rpartition("```\n--trainer")[2].partition("\n")[0]
    command = pipeline.parser().parse(f"--trainer{flags}".split())
    assert command.trainer.init_args["strategy"].init_args["balance"] == sizes
    assert "By time the stages of" in text


def test_a_row_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "get_args", lambda _: ["1F1B"])
    out = tmp_path / "run"
    flags = [*QUICK, "--split_sizes", "2", "--trainer.strategy.balance", "[2,2]"]  # there are five layers
    assert exit_code(pipeline, *flags, "--out", str(out)) == 1
    assert {"one device", "split after stage1", "1F1B after stage1, split size 2"} <= set(rows(out))
    failed = "1F1B into [2,2], split size 2"
    assert failed not in rows(out)
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith(f"{failed} failed: "))
    assert "add up to 5" in line
    assert f"{failed}: failed: " in (out / "results.md").read_text()


def test_a_signal_ends_the_run_and_keeps_its_rows(tmp_path: Path) -> None:
    kept = {"one device", "one device, split size 4"}
    ends_by_a_signal(_slow_when_split, [*QUICK, "--split_sizes", "4"], tmp_path, kept, prints="in the pipeline")


def _slow_when_split(flags: list[str]) -> None:
    measure = Bench.measure

    def measured(self: Bench, row: Case) -> Any:
        if row.schedule is not None:
            print("in the pipeline", flush=True)
            self.repeats = 100_000
        return measure(self, row)

    Bench.measure = measured  # type: ignore[method-assign]
    pipeline.main(flags)


# Its parts


def test_the_tutorials_figures_stand_beside_its_own_experiment() -> None:
    rows = study(["--trainer.devices", "2"], sizes=(12, 20, 40), cut=Cut("after layer2", [11, 12])).first()
    facts = [
        {"name": row.name, "num_microbatches": row.num_microbatches, "seconds_per_step": [1.0, 3.0], "speedup": 1.0,
         "bubble_bound": row.bubble_bound, "share_of_bound": row.bubble_bound and 1 / row.bubble_bound}
        for row in rows
    ]  # fmt: skip
    net = {"class_path": "lit_modules.nets.Torchvision", "init_args": {"name": "resnet50"}}
    config = {"net": net, "batch_size": 120, "image_size": 128, "num_classes": 1000}
    measured = [*zip(rows, facts, strict=True)]
    lines = table(config, measured).rows
    assert {line[0]: line[-1] for line in lines if line[-1] != "—"} == {
        "one device": "1.25, 1.00 x",
        **dict.fromkeys(["split after layer2", "split by time"], "1.34, 0.93 x"),
        **dict.fromkeys([f"1F1B {cut}, split size 20" for cut in ("after layer2", "by time")], "0.84, 1.49 x"),
        **dict.fromkeys([f"1F1B {cut}, split size 12" for cut in ("after layer2", "by time")], "0.81, 1.54 x"),
    }
    assert lines[0][2] == "2.00 ± 1.4"
    lines = table({**config, "batch_size": 60}, measured).rows
    assert {line[-1] for line in lines} == {"—"}


def study(flags: list[str], batch: int = 120, sizes: tuple[int, ...] = (8,), cut: Cut | None = None) -> Cases:
    config = pipeline.parser().parse(flags)
    return Cases(Namespace(trainer=config.trainer, batch_size=batch, split_sizes=sizes), SCHEDULES, cut)


def test_a_schedule_that_can_not_cut_so_takes_a_few_more() -> None:
    counts = {row.schedule: row.num_microbatches for row in study(["--trainer.devices", "2"]).side_by_side(8)}
    assert counts["1F1B"] == counts["ZBVZeroBubble"] == 15
    assert study(["--trainer.devices", "2"])._strategy.init_args["timeout"] == 300.0
    assert counts["Interleaved1F1B"] == counts["InterleavedZeroBubble"] == 16  # a multiple of the rounds


def test_bounds_on_more_ranks_and_cuts_that_fit() -> None:
    cut = Cut("after layer2", [11, 12])
    rows = study(["--trainer.devices", "4"], cut=cut)
    assert not [row for row in rows.first() if row.cut == cut]  # it has two stages
    bounds = {row.num_microbatches: row.bubble_bound for row in rows.first() if row.schedule == "1F1B"}
    assert bounds == {15: pytest.approx(4 * 15 / 18)}
    assert bubble_bound(2, 1) == 1
    rows = study(["--trainer.strategy.balance", "[3,4]", "--trainer.devices", "2"], cut=cut)
    labels = {row.schedule: row.name for row in rows.side_by_side(8)}
    assert labels["GPipe"] == "GPipe into [3,4], split size 8"
    assert labels["LoopedBFS"] == "LoopedBFS by time, split size 8"  # it has four stages


def test_micro_batches_on_one_device_take_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.studies.pipeline.measure.LEARNING_RATE", 1.0)
    start = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    ends = []
    for count in (1, 3):
        task = Task([*copy.deepcopy(start)], count)
        with quiet():
            small = trainer(max_epochs=1, precision="64-true")
            small.fit(task, Noise(7, (6,), 4, steps=3, seed=0))
        assert small.global_step == 3
        ends.append(torch.cat([p.detach().flatten() for p in task.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-14)
    assert (ends[0] - torch.cat([p.detach().flatten() for p in start.parameters()])).abs().max() > 0.01
