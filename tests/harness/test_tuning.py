"""Tuning: equal budgets in one pass, to the bits of each setting by itself, whatever stops it on the way."""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from datamodules import Digits, InMemoryData, Text
from datamodules.splits import Split
from experiments import kd
from harness.reports.bakeoff import tuning as reports
from harness.runs import records, safepoints
from harness.runs.plans import FitPlan
from harness.runs.safepoints import SafePoints
from harness.runs.session import session
from harness.studies import side_by_side
from harness.studies.compare.pool import pool
from harness.studies.compare.runs import load_run
from harness.studies.tuning import halving as tuning
from tests.commands import Refusal, kill_at, lasting, nets, results, start
from tests.grids import mostly_slow
from tests.language import written
from tests.training import assert_same

SMALL = [
    "--data", "Digits",
    "--data.train_size", "150", "--data.test_size", "100", "--data.batch_size", "60", "--seeds", "[3]",
    "--teacher", "LightNN", "--trainer.max_epochs", "3", "--checkpoint_every", "1e-9",
]  # fmt: skip
TUNED = [*SMALL, "--only", "ce", "hint", "--tune", "3", "--tune_seeds", "[7,8]"]
RATES = ["--scheduler", "CosineAnnealingLR", "--scheduler.T_max", "3"]
RATES += ["--optimizer", "SGD", "--optimizer.momentum", "0.9"]


def finished(out: Path, *flags: str) -> Path:
    start(out, *flags).check()
    return out


def ended(out: Path) -> tuple[dict[str, Tensor], Any]:
    """The nets of the table, and the results without what a call has spent."""
    return nets(out), lasting(results(out), "teacher_samples", "teacher_samples_alone")


def assert_ends_as(out: Path, other: Path) -> None:
    ours, theirs = ended(out), ended(other)
    assert_same(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert not list((out / "tuning").rglob("*.ckpt"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("tuned") / "run", *TUNED)


# What it finds


def test_every_method_has_the_same_budget_and_its_best_setting_is_in_the_table(whole: Path) -> None:
    facts = results(whole)
    tuned, cost = facts["tuning"], facts["tuning_cost"]
    assert tuned.keys() == {"ce", "hint"}
    for entry in tuned.values():
        ends = [setting["epochs"] for setting in entry["settings"]]
        assert sorted(ends) == [1, 2, 3]  # 3 settings, 2 of them after an epoch, 1 after two
        assert entry["chosen"] == ends.index(3)
        assert [len(setting["validation"]) for setting in entry["settings"]] == [2, 2, 2]
        given = entry["settings"][0]["options"]
        assert (given["optimizer.lr"], given["optimizer.weight_decay"]) == (0.001, 0)
    assert tuned["hint"]["settings"][0]["options"]["hint_weight"] == 0.25
    assert set(cost["student_epochs"].values()) == {2 * (1 + 2 + 3)}  # of two seeds
    images = facts["data"]["train"]
    assert cost["teacher_samples"] == 2 * 3 * images  # of two seeds, stored again at each of three rungs
    assert cost["teacher_samples_alone"] == 2 * 3 * images  # stored once for each of hint's three settings; ce has none
    assert cost["teacher_epochs"] == 2 * 3  # one for each of the two seeds
    assert cost["teacher_fit_seconds"] > 0
    page = (whole / "results.md").read_text()
    chosen = tuned["hint"]["settings"][tuned["hint"]["chosen"]]["options"]
    for said in (
        "## Tuning", "seeds 7 and 8, not in the table; after 1 and 2 of 3 epochs the better half of each went on.",
        ", and 6 epochs of its teachers in ", f"- hint: Hint(hint_weight={chosen['hint_weight']}, ",
        f"), optimizer.lr {chosen['optimizer.lr']}, optimizer.weight_decay {chosen['optimizer.weight_decay']}\n",
        "best of 3, so it is too good: of 3 equal settings the best is expected 0.85 standard deviations",
    ):  # fmt: skip
        assert said in page
    assert " 1 epochs" not in page
    score = 100 * facts["students"]["hint"]["epochs"][0][-1]["val/acc"]
    assert any(line.startswith("| hint |") and f" epochs | {score:.2f} | " in line for line in page.split("\n"))
    assert (whole / "tuning.png").stat().st_size > 0


def test_the_chosen_setting_is_what_the_table_s_students_learn_by(whole: Path) -> None:
    for name, entry in results(whole)["tuning"].items():
        chosen = entry["settings"][entry["chosen"]]["options"]
        flags = [f"--{'' if '.' in key else f'variants.{name}.'}{key}={value}" for key, value in chosen.items()]
        teacher = ["--teacher_ckpt", str(whole / "seed3" / "teacher" / "weights.pt")]
        alone = finished(whole.parent / name, *SMALL, "--only", name, *flags, *teacher)
        assert_same(nets(alone, f"seed3/{name}"), nets(whole, f"seed3/{name}"))


class Counted(Split):
    """A test set that counts how often each of its samples is read."""

    counts: ClassVar[Tensor]

    def take(self, chosen: Tensor) -> Split:
        Counted.counts += torch.bincount(chosen, minlength=len(self.labels))
        return super().take(chosen)

    @classmethod
    def of(cls, test: Any) -> "Counted":
        cls.counts = torch.zeros(len(test.labels), dtype=torch.int64)
        return cls(*test)


class CountsTest(InMemoryData):
    """A data set, whichever way its test samples are read."""

    def setup(self, stage: str | None = None) -> None:
        new = not self._splits
        super().setup(stage)
        self._splits |= {"test": Counted.of(self._splits["test"])} if new else {}


class CountedDigits(CountsTest, Digits):
    """Digits, of which the test images are counted."""


class CountedText(CountsTest, Text):
    """A text, of which the test blocks are counted."""


OF_TEXT = [
    "--seeds", "[3]", "--data.block_size", "16", "--teacher", "GPT", "--teacher.num_layers", "1", "--student", "GPT",
    "--student.num_layers", "1", "--student.embed_dim", "8", "--student.num_heads", "2", "--only", "ce", "kd",
    "--trainer.max_epochs", "3", "--trainer.limit_train_batches", "2", "--tune", "2",
]  # fmt: skip


@pytest.mark.parametrize(("data", "flags"), [
    ("CountedDigits", TUNED), pytest.param("CountedText", OF_TEXT, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_test_sample_is_read_once_for_each_fit_of_the_table(
    data: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, set[int]]] = []

    def at(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *of, **more: seen.append((name, {*Counted.counts.tolist()})) or own(*of, **more)

    monkeypatch.setattr(tuning.Tuning, "facts", at("tuned", tuning.Tuning.facts))
    monkeypatch.setattr(side_by_side, "combine", at("tested", side_by_side.combine))
    text = ["--data.path", str(written(tmp_path, 900))] if flags is OF_TEXT else []
    chosen = ["--data", f"{__name__}.{data}", *text]
    kd.main([*flags, "--tune_seeds", "1", *chosen, "--out", str(tmp_path / "run")])
    # The teacher is a fit, and so are the two students, of which each batch is read once for both.
    assert seen == [("tuned", {0}), ("tested", {2})]


@pytest.fixture
def other_seed(whole: Path, tmp_path: Path) -> Path:
    """What the tuned run would be with another seed in its table, by another commit."""
    out = shutil.copytree(whole, tmp_path / "other")
    (out / "seed3").rename(out / "seed4")
    found = results(out)
    changed = {"seeds": [4], "commits": ["other"], "config": {**found["config"], "seeds": [4]}}
    (out / "results.json").write_text(json.dumps(found | changed))
    return out


def test_pooled_runs_have_the_cost_of_all_searches(
    whole: Path, other_seed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [load_run(whole, whole, "one"), load_run(other_seed, other_seed, "two")]
    pooled, found = pool(runs), results(whole)
    commit = " then ".join(map(str, found["commits"]))
    assert f"commits differ: {commit} of one; other of two" in capfd.readouterr().out
    facts = pooled.to_json()
    assert facts["tuning"] == found["tuning"]
    assert facts["tuning_cost"]["student_epochs"] == {"ce": 2 * 12, "hint": 2 * 12}
    for key in ("teacher_epochs", "teacher_samples", "fit_seconds"):
        assert facts["tuning_cost"][key] == 2 * found["tuning_cost"][key]
    assert "The search took in all 2 runs together 48 student-epochs" in " ".join(reports.notes(pooled))
    assert pool(runs[:1]).to_json()["tuning_cost"] == found["tuning_cost"]


# The same bits


WITH_PARTS = {"crd": "CRD", "ctkd": "CTKD", "simkd": "SimKD", "vid": "VID"}  # and a bank, or a net of its own
SURVIVORS = {
    "Adam": ["--only", "ce", "hint"],
    "SGD and a schedule": ["--only", "ce", "hint", *RATES],
    "hidden labels": ["--only", "ce", "hint", "--data.labelled", "40"],
    "2 processes": ["--only", "ce", "hint", "--trainer.devices", "2"],
    "parts": ["--only", *WITH_PARTS, *(f"--variants.{name}={found}" for name, found in WITH_PARTS.items())],
}
SURVIVORS["parts on 2 processes"] = [*SURVIVORS["parts"], "--trainer.devices", "2"]


@pytest.mark.parametrize("kind", mostly_slow(SURVIVORS, "Adam", "SGD and a schedule", "hidden labels"))
def test_a_survivor_has_the_bits_of_its_setting_alone(kind: str, tmp_path: Path) -> None:
    def main(flags: Sequence[str]) -> None:
        with session("kd", kd.parser(), flags) as made, made.folder():
            bake_off = kd.KD(made)
            bake_off.check()
            assert_survivors_are_as_alone(tuning.Tuning(bake_off))

    start(tmp_path / "run", *SMALL, "--tune", "4", "--tune_seeds", "[7]", *SURVIVORS[kind], main=main).check()


def assert_survivors_are_as_alone(search: tuning.Tuning) -> None:
    alive, inner = search.halve(), search.inner
    folder = inner.session.out / "seed7"
    together = safepoints.read(folder / "rung3.ckpt")
    for row, (number, *_) in alive.items():
        arm = search.trials[row][number]
        inner.fit(FitPlan(7, f"students-{row}", (arm,), 3, keeps_checkpoint=True, tested=False))
        whole = safepoints.read(folder / f"students-{row}.ckpt")
        mine = f"students.{arm.name}."
        own = {key: value for key, value in together["state_dict"].items() if key.startswith(mine)}
        assert_same(own, whole["state_dict"])
        state, alone_state = (checkpoint["optimizer_states"][0] for checkpoint in (together, whole))
        group, (only,) = state["param_groups"][list(alive).index(row)], alone_state["param_groups"]
        assert {**group, "params": []} == {**only, "params": []}
        for ours, theirs in zip(group["params"], only["params"], strict=True):
            moments = (state["state"].get(ours, {}), alone_state["state"].get(theirs, {}))
            assert_same(*({key: torch.as_tensor(x) for key, x in of.items() if x is not None} for of in moments))
        alone = json.loads((folder / f"students-{row}.json").read_text())
        assert alone["nets"][arm.name]["epochs"] == search._last_records(7)[arm.name].epochs


@pytest.mark.slow
def test_exact_tuning_has_the_same_bits_on_several_processes(tmp_path: Path) -> None:
    exact = [*TUNED, "--exact", "3", "--data.augment", "true", "--tune_seeds", "1"]
    one, *others = (finished(tmp_path / count, *exact, "--trainer.devices", count) for count in "123")
    for other in others:
        assert_ends_as(other, one)


def test_waves_change_no_bit(whole: Path, tmp_path: Path) -> None:
    out = finished(tmp_path / "run", *TUNED, "--tune_wave", "2")
    assert_ends_as(out, whole)
    assert len(json.loads((out / "tuning" / "plan.json").read_text())["waves"]) == 3
    assert (out / "tuning" / "seed7" / "rung1-3.json").exists()


def test_a_run_grows_by_methods_and_seeds(whole: Path, tmp_path: Path) -> None:
    out = finished(tmp_path / "run", *SMALL, "--only", "hint", "--tune", "3", "--tune_seeds", "[7,8]")
    finished(out, "--resume", "true", "--only", "ce", "hint")
    found, other = ended(out), ended(whole)
    assert_same(found[0], other[0])
    assert found[1]["tuning"] == other[1]["tuning"]


PHASES: dict[str, tuple[Any, ...]] = {
    "the plan, before it is written": (tuning, "write_json", 1, False),
    "a teacher, in mid-epoch": (SafePoints, "on_train_batch_start", 2, True),
    "first rung, in mid-epoch": (SafePoints, "on_train_batch_start", 2, True, "seed7/teacher.json"),
    "first rung, trained and not recorded": (records, "write_json", 1, False, "seed7/teacher.json"),
    "second seed's teacher": (SafePoints, "on_train_batch_start", 3, True, "seed7/rung1.json"),
    "before a checkpoint is carried on": (tuning, "carry", 1, False),
    "after it": (tuning, "carry", 1, True),
    "second rung, between a checkpoint's write and its rename": (Path, "replace", 1, False, "seed7/rung2.ckpt"),
    "last rung, in mid-epoch": (SafePoints, "on_train_batch_start", 2, True, "seed8/rung2.json"),
    "all rungs done": (tuning.Tuning, "facts", 1, False),
    "the table's students": (SafePoints, "on_train_batch_start", 6, True, "seed8/rung3.json"),
    "the results": (side_by_side, "save_results", 1, False),
}


@pytest.mark.parametrize(("devices", "every"), mostly_slow([(1, 4), (1, 1), (2, 1)], (1, 4)))
def test_killed_in_all_phases_it_ends_the_same(devices: int, every: int, whole: Path, tmp_path: Path) -> None:
    """In one run; of the phases only every fourth, or all."""
    out, ranks = tmp_path / "run", ["--trainer.devices", str(devices)]
    if devices > 1:
        whole = finished(tmp_path / "whole", *TUNED, *ranks)
    for number, (owner, name, call, after, *since) in enumerate([*PHASES.values()][every - 1 :: every]):
        arm = kill_at(owner, name, call, after, since=out / "tuning" / since[0] if since else None)
        start(out, *TUNED, *ranks, *(["--resume", "true"] if number else []), before=arm).check(-signal.SIGKILL)
    finished(out, "--resume", "true")
    assert_ends_as(out, whole)
    costs = (results(each)["tuning_cost"] for each in (out, whole))
    killed, undisturbed = ({key: cost[key] for key in ("teacher_samples", "teacher_samples_alone")} for cost in costs)
    assert killed == undisturbed


# What is refused


def test_a_tuned_run_keeps_its_epochs(whole: Path, refusal: Refusal) -> None:
    line = refusal(kd.main, "--out", whole, "--resume", "true", "--trainer.max_epochs", "4")
    assert line.startswith("--trainer.max_epochs 4: expected 3, for which settings were searched")
    assert "max_epochs: 3\n" in (whole / "config.yaml").read_text()  # or no call could go on with the run


def test_options_of_a_tuned_run_are_checked_with_the_run_s_own(whole: Path, refusal: Refusal) -> None:
    resumed = ["--out", str(whole), "--resume", "true"]
    line = refusal(kd.main, *resumed, "--tune_wave", "1")
    assert line.startswith(f"--tune_wave 1: expected no --tune_wave, as the search in {whole} began")
    kd.parser().parse([*resumed, "--tune_seeds", "[7,8]", "--tune_optimizer", "true"])
