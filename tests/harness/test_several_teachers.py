"""Several teachers in one run: each student learns what it would learn from its own teachers in a run of their own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deploy.net_path import teachers_beside
from experiments import compare, kd
from harness.runs.nets import read_facts
from tests import forked_jobs
from tests.commands import nets, results, start
from tests.training import assert_same

QUICK = ["--seeds", "1", "--trainer.max_epochs", "2", "--data.train_size", "60", "--data.test_size", "40"]
QUICK += ["--variants.far", "Hinton", "--variants.mix", "Hinton", "--variants.mix.temperature", "4"]
BIG = ["--teachers.big", "ResNet", "--teachers.big.depth", "8", "--taught_by.far", "big"]
MIX = ["--taught_by.mix.teacher", "3", "--taught_by.mix.big", "1"]
ROWS = ["--only", "ce", "kd", "far", "mix"]


def run(out: Path, *flags: str) -> Path:
    kd.main([*QUICK, *flags, "--out", str(out)])
    return out


def state(out: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(out / "seed0" / name / "weights.pt")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("several") / "run", *BIG, *MIX, *ROWS)


def test_students_of_each_teacher_equal_those_of_a_run_of_its_own(several: Path, tmp_path: Path) -> None:
    first = run(tmp_path / "first", "--only", "ce", "kd")
    second = run(tmp_path / "second", "--teacher", "ResNet", "--teacher.depth", "8", "--only", "far")
    same = {first: {"teacher": "teacher", "ce": "ce", "kd": "kd"}, second: {"teacher": "teacher-big", "far": "far"}}
    for folder, names in same.items():
        for theirs, ours in names.items():
            assert_same(state(folder, theirs), state(several, ours))
    members = [str(several / "seed0" / name) for name in ("teacher", "teacher-big")]
    flags = ["--teacher", "Ensemble", "--teacher.members", json.dumps(members), "--teacher.weights", "[3,1]"]
    third = run(tmp_path / "third", *flags, "--only", "mix")
    assert_same(state(third, "mix"), state(several, "mix"))


def test_the_table_has_each_teacher_with_its_cost_and_says_who_taught_whom(several: Path) -> None:
    facts = results(several)
    assert [*facts["more_teachers"]] == ["teacher-big"]
    teacher = facts["more_teachers"]["teacher-big"]
    assert teacher["train_flops"] > 0
    assert teacher["parameters"] != facts["teacher"]["parameters"]
    page = (several / "results.md").read_text()
    lines = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert lines[:7] == ["variant", ":--", "teacher", "teacher-big", "ce", "kd", "far"]
    assert "far: taught by teacher-big." in page
    assert "mix: taught by 0.75 teacher and 0.25 teacher-big." in page
    for name in ("kd", "far", "mix"):
        assert 0 <= facts["students"][name]["test_agreement"][0] <= 1


def test_agreement_is_with_the_student_s_own_teacher(several: Path) -> None:
    facts = read_facts(several / "seed0" / "mix")
    assert facts is not None
    assert facts.taught_by == {"teacher": 3.0, "teacher-big": 1.0}
    assert [path.name for path in teachers_beside(several / "seed0" / "far")] == ["teacher-big"]
    assert [path.name for path in teachers_beside(several / "seed0" / "kd")] == ["teacher"]


def test_a_finished_run_is_not_repeated_and_pools_with_another_seed(several: Path, tmp_path: Path) -> None:
    before = results(several)
    kd.main(["--out", str(several), "--resume", "true"])
    after = results(several)
    assert all(after[key] == before[key] for key in ("teacher", "more_teachers", "students"))
    other = run(tmp_path / "other", *BIG, *MIX, *ROWS, "--seeds", "[1]")
    compare.main([str(several), str(other), "--pool", "--out", str(tmp_path / "pool")])
    pooled = results(tmp_path / "pool")
    assert len(pooled["more_teachers"]["teacher-big"]["test_acc"]) == 2
    assert pooled["students"]["far"]["taught_by"] == "teacher-big"


@pytest.mark.slow
def test_any_number_of_processes_and_an_interruption_give_the_same_bits(several: Path, tmp_path: Path) -> None:
    exact = ["--exact", "4", *BIG, *MIX, *ROWS]
    one = nets(run(tmp_path / "one", *exact, "--trainer.devices", "1"))
    two = nets(run(tmp_path / "two", *exact, "--trainer.devices", "2"))
    assert_same(one, two)
    part = run(tmp_path / "part", *BIG, *MIX, "--only", "far", "mix")
    run(part, *BIG, *MIX, *ROWS, "--resume", "true")
    assert_same(nets(part), nets(several))


@pytest.mark.slow
def test_jobs_give_the_same_bits(several: Path, tmp_path: Path) -> None:
    flags = [*QUICK, *BIG, *MIX, *ROWS, "--launcher", "local"]
    start(tmp_path / "jobs", *flags, before=forked_jobs.fork_jobs).check()
    assert_same(nets(tmp_path / "jobs"), nets(several))


def test_a_method_of_several_nets(tmp_path: Path) -> None:
    flags = ["--students.a", "LightNN", "--students.b", "LightNN", "--students.b.hidden", "32", "--only", "ce", "kd"]
    out = run(
        tmp_path / "nets", *flags, "--teachers.big", "LightNN", "--taught_by.kd", "big", "--trainer.max_epochs", "1"
    )
    assert {name: row.get("taught_by") for name, row in results(out)["students"].items()} == {
        "a-ce": None, "a-kd": "teacher-big", "b-ce": None, "b-kd": "teacher-big",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--teachers.big", "ResNet"], "--teachers.big ResNet: expected a student that it teaches: --taught_by"),
        (["--taught_by.kd", "bog"], "--taught_by.kd bog: expected teachers among teacher; --teachers.NAME CLASS add"),
        (["--taught_by.kq", "teacher"], "--taught_by.kq teacher: expected after --taught_by a name among ce, kd, "),
        (["--taught_by", "kd"], "--taught_by kd: expected a name after it, as --taught_by.NAME VALUE"),
        ([*BIG[:2], "--taught_by.ce", "big"], "--taught_by.ce teacher-big: expected a method that asks a teacher; Cro"),
        ([*BIG[:2], "--taught_by.kd.big", "0"], "--taught_by.kd.big 0: expected a weight above 0, or the name of one"),
        ([*BIG[:2], "--taught_by.kd", "big", "--tune", "2"], "--taught_by.kd big: not allowed with --tune"),
        (
            [*BIG[:2], "--taught_by.kd", "{teacher: 1, big: 1}", "--trainer.strategy", "pipeline", "--only", "kd"],
            "--taught_by.kd 0.5 teacher and 0.5 teacher-big: expected one teacher under a pipeline",
        ),
        (
            [*BIG[:2], "--taught_by.kd", "big", "--taught_by.kd.teacher", "1"],
            "--taught_by.kd.teacher 1: expected either the weights of the teachers of kd, or one teacher",
        ),
        (
            [*BIG[:2], "--variants.a", "DML", "--variants.a.peers", "[b]", "--variants.b", "Sum",
             "--variants.b.objectives", "[Hinton]", "--taught_by.b", "big"],
            "--variants.a.peers b: expected students with the same teachers, by --taught_by",
        ),
    ],
)  # fmt: skip
def test_wrong_teachers_are_refused_in_one_line(flags: list[str], line: str, refusal: Callable[..., str]) -> None:
    assert refusal(kd.main, *flags).startswith(line)
