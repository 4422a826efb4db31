"""kd.py with some labels: only the students lack them, and what the run leaves says so."""

from pathlib import Path

import pytest
import torch

from experiments import compare, kd
from harness.runs.plans import FitPlan
from harness.studies.bakeoff import BakeOff
from lit_modules.training.loop import Loop
from tests.commands import results
from tests.training import assert_same

SMALL = [
    *("--data", "Digits"),
    *("--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "2", "--data.train_size", "150"),
    *("--data.batch_size", "20", "--only", "ce", "kd", "--trainer.logger", "false"),
]


def weights(out: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(out / "seed0" / name / "weights.pt", weights_only=True)


def ran(folder: Path, name: str, *flags: str) -> Path:
    kd.main([*SMALL, "--out", str(folder / name), *flags])
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("labelled")
    ran(out, "few", "--data.labelled", "10")
    ran(out, "all")
    return out


def test_the_teacher_sees_all_labels(folder: Path) -> None:
    assert_same(weights(folder / "few", "teacher"), weights(folder / "all", "teacher"))
    for name in ("ce", "kd"):
        pairs = zip(weights(folder / "few", name).values(), weights(folder / "all", name).values(), strict=True)
        assert not all(torch.equal(one, other) for one, other in pairs)


def test_a_run_says_who_has_which_labels(folder: Path, tmp_path: Path) -> None:
    drawn = "students: labels of 10 of 150 training samples, which each seed draws"
    said = f"{drawn}; the teacher was trained with all labels."
    assert said in (folder / "few" / "results.md").read_text()
    assert "labelled=10" in (folder / "few" / "results.md").read_text()
    assert "students: labels" not in (folder / "all" / "results.md").read_text()
    few, whole = (results(folder / name) for name in ("few", "all"))
    assert few["data"] == whole["data"]
    assert few["students"]["ce"]["train_flops"] == whole["students"]["ce"]["train_flops"]
    teacher = ["--teacher_ckpt", str(folder / "all/seed0/teacher/weights.pt")]
    found = ran(tmp_path, "loaded", "--data.labelled", "10", *teacher)
    assert "150 training samples, which each seed draws; the teacher was loaded." in (found / "results.md").read_text()
    assert_same(weights(found, "kd"), weights(folder / "few", "kd"))


def test_a_run_goes_on_from_its_teacher_with_its_labels(folder: Path, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def build(bake_off: BakeOff, plan: FitPlan) -> Loop:
        if plan.name == "students":
            raise StoppedError
        return real(bake_off, plan)

    real = BakeOff.build
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BakeOff, "build", build)
        with pytest.raises(StoppedError):
            ran(tmp_path, "stopped", "--data.labelled", "10")
    found = ran(tmp_path, "stopped", "--data.labelled", "10", "--resume", "true")
    assert_same(weights(found, "kd"), weights(folder / "few", "kd"))


def test_compare_says_that_labels_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main([str(folder / "few"), str(folder / "all")])
    said = " ".join(capsys.readouterr().out.split())
    assert "other data" not in said
    assert "data.labelled" in said
