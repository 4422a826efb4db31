"""The main job, end to end: on real data, on several processes, and with input that can't be used."""

import errno
import json
import os
import random
import shlex
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import Digits
from experiments import hardware, kd
from harness.runs.environment import limit_threads
from harness.runs.nets import load_net
from lit_modules.nets import LightNN
from tests.commands import Refusal, left_by_overwriting, results, run_of
from tests.grids import mostly_slow
from tests.launching import torchrun
from tests.processes import Run
from tests.training import assert_same, net

QUICK = [
    "--data", "Digits", "--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "150",
]  # fmt: skip
FINISHED = [*QUICK, "--seeds", "2", "--only", "ce", "kd"]


finished = run_of(kd, *FINISHED)


def test_a_run_leaves_nets_with_the_scores_in_its_results(finished: Path, tmp_path: Path) -> None:
    found = results(finished)
    assert len(found["students_fit_seconds"]) == 2
    assert min(net["step_ms"] for net in (found["teacher"], *found["students"].values())) > 0
    assert min(found["teacher"]["fit_seconds"]) > 0
    (call,) = json.loads((finished / "environment.json").read_text())["calls"]
    assert call["command"] == shlex.join(["kd.py", *FINISHED, "--out", str(finished)])
    assert found["commits"] == [call["commit"] and call["commit"] + "-dirty" * call["dirty"]]
    for name in ("config.yaml", "environment.json", "report.html", "results.md", "results.png"):
        assert (finished / name).stat().st_size > 0
    again = LightNN((1, 8, 8))
    again.load_state_dict(torch.load(finished / "seed1" / "kd" / "weights.pt", weights_only=True))
    data = Digits()
    data.setup()
    test = data.split("test")
    predicted = load_net(finished / "seed1" / "kd")(data.normalize(test.inputs)).argmax(1)
    assert int((predicted == test.labels).sum()) == found["students"]["kd"]["test_correct"][1]
    assert not left_by_overwriting(finished, tmp_path)


def test_a_teachers_costs_are_those_of_its_layers(finished: Path) -> None:
    # LightNN on 8 x 8: forward is 2 FLOPs a multiplication; backward twice that, but for the first layer's input.
    first, second, dense = 64 * 16 * 9, 16 * 16 * 16 * 9, 16 * 4 * 256 + 256 * 10
    per_sample = 2 * (2 * first + 3 * second + 3 * dense)
    assert results(finished)["teacher"]["train_flops"] == per_sample * 150


@pytest.mark.parametrize(("shape", "limit"), [((1, 8, 8), [1]), ((3, 32, 32), []), ((64,), [])])
def test_one_thread_is_for_tiny_images(shape: tuple[int, ...], limit: list[int], monkeypatch: Any) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(shape)
    assert found == limit


def test_a_loaded_teacher_is_tested_not_trained(finished: Path, tmp_path: Path) -> None:
    ckpt = finished / "seed0" / "teacher" / "weights.pt"
    kd.main([*QUICK, "--only", "ce", "kd", "--teacher_ckpt", str(ckpt), "--out", str(tmp_path / "run")])
    found, before = results(tmp_path / "run"), results(finished)
    assert found["teacher"]["test_correct"] == before["teacher"]["test_correct"][:1]
    assert found["students"]["kd"]["test_correct"] == before["students"]["kd"]["test_correct"][:1]
    assert found["teacher"]["fit_seconds"] == [None]
    assert found["teacher"]["step_ms"] is None
    assert found["students"]["kd"]["delta_vs_ce"]["low"] is None
    assert_same(torch.load(ckpt), torch.load(tmp_path / "run" / "seed0" / "teacher" / "weights.pt"))


def test_a_loaded_teacher_is_one_for_all_seeds_or_one_a_seed(finished: Path, tmp_path: Path, refusal: Refusal) -> None:
    before = results(finished)["teacher"]["test_correct"]
    given = {"one": finished / "seed1/teacher/weights.pt", "each": finished / "seed{seed}/teacher/weights.pt"}
    for name, path in given.items():
        flags = [*QUICK, "--seeds", "2", "--only", "ce", "--teacher_ckpt", str(path)]
        kd.main([*flags, "--out", str(tmp_path / name)])
    one, each = (results(tmp_path / name)["teacher"] for name in given)
    assert (one["nets"], one["test_correct"]) == (1, [before[1]] * 2)
    assert (each["nets"], each["test_correct"]) == (2, before)
    told = {name: (tmp_path / name / "results.md").read_text() for name in given}
    rows = {name: next(line for line in text.splitlines() if "| teacher" in line) for name, text in told.items()}
    assert {name: "±" in row for name, row in rows.items()} == {"one": False, "each": True}
    assert "teacher: one net, tested once" in told["one"]
    missing = str(given["each"]).replace("{seed}", "2")
    line = refusal(kd.main, *QUICK, "--seeds", "3", "--teacher_ckpt", given["each"])
    assert line.startswith(f"--teacher_ckpt {missing}: expected")
    assert line.endswith("there is none")


class Strangers(LightNN):
    """First weights from where a stranger draws them.

    Args:
        source: "global", or "entropy" of the system's.
        kwargs: the parent's.
    """

    def __init__(self, source: str = "global", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        draw = np.random.standard_normal if source == "global" else np.random.default_rng().standard_normal
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.as_tensor(random.uniform(0.1, 0.2) * draw(tuple(parameter.shape))))


def test_nets_from_numpys_and_pythons_numbers_start_equal(tmp_path: Path) -> None:
    flags = [*QUICK, "--student", f"{__name__}.Strangers", "--variants.again", "CrossEntropy"]
    kd.main([*flags, "--only", "ce", "again", "--out", str(tmp_path / "run")])
    ce, again = (torch.load(tmp_path / "run" / "seed0" / name / "weights.pt") for name in ("ce", "again"))
    assert_same(ce, again)


@pytest.mark.parametrize(("main", "flag"), [(kd.main, "teacher"), (kd.main, "student"), (hardware.main, "net")])
def test_nets_whose_first_weights_do_not_follow_from_the_seed_are_refused(
    main: Callable[..., None], flag: str, refusal: Refusal
) -> None:
    line = refusal(main, f"--{flag}", f"{__name__}.Strangers", f"--{flag}.source", "entropy")
    assert line.startswith(f"--{flag} Strangers: expected a net whose first weights come")
    assert "two made with one seed differ in features.0.weight" in line


@pytest.mark.slow
def test_the_table_in_float64_is_that_of_one_process(tmp_path: Path) -> None:
    tables = []
    for n in ("1", "8"):
        flags = ["--trainer.precision", "64-true", "--trainer.devices", n, "--data.batch_size", "67"]
        flags += ["--trainer.max_epochs", "4", "--out", str(tmp_path / n)]
        Run(kd.main, [*QUICK, *flags], log=tmp_path / "log").check()
        found = results(tmp_path / n)
        nets = {**found["students"], "teacher": found["teacher"]}
        tables.append({name: entry["test_correct"] for name, entry in nets.items()})
    assert tables[0] == tables[1]
    assert len(tables[0]) == 5


@pytest.mark.slow
def test_under_torchrun_the_ranks_share_one_run(tmp_path: Path) -> None:
    flags = [*QUICK, "--trainer.precision", "64-true", "--only", "ce", "kd", "--trainer.devices"]
    kd.main([*flags, "1", "--out", str(tmp_path / "alone")])
    launched = torchrun("--nproc_per_node", "2", "--standalone", log=tmp_path / "log", flags=[*flags, "2"])
    assert launched.wait() == 0, launched.output
    (out,) = (tmp_path / "runs" / "kd").iterdir()
    together, alone = results(out), results(tmp_path / "alone")
    for name in ("ce", "kd"):
        assert together["students"][name]["test_correct"] == alone["students"][name]["test_correct"]


def jpegs(archive: Path, out: Path, train: int, test: int) -> None:
    """Some images of each class of the shared CIFAR-10."""
    taken: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            kind = str(Path(member.name).parent)
            if member.isfile() and taken.get(kind, 0) < (train if "/train/" in member.name else test):
                taken[kind] = taken.get(kind, 0) + 1
                tar.extract(member, out, filter="data")


@pytest.mark.slow
@pytest.mark.real_data
def test_cifar_images_end_to_end(data_root: Path, tmp_path: Path) -> None:
    jpegs(data_root / "cifar10-jpg.tar.xz", tmp_path, train=60, test=20)
    flags = ["--data", "ImageFolder", "--data.root", str(tmp_path / "cifar10"), "--data.validation_size", "0"]
    flags += ["--seeds", "1"]
    kd.main([*flags, "--trainer.max_epochs", "1", "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    assert found["data"] == {"name": "ImageFolder", "train": 600, "validation": 0, "test": 200}
    assert found["teacher"]["parameters"] == 1_186_986
    assert set(found["students"]) == {"ce", "kd", "cosine", "hint"}
    assert all(0.1 < entry["test_acc"][0] < 0.7 for entry in found["students"].values())


@pytest.mark.slow
@pytest.mark.real_data
def test_half_of_mnist_brings_the_student_above_90_percent(data_root: Path, tmp_path: Path) -> None:
    flags = ["--data", "MNIST", "--data.root", str(data_root), "--teacher", "LightNN", "--only", "kd", "--seeds", "1"]
    flags += ["--data.train_size", "27000"]
    kd.main([*flags, "--trainer.max_epochs", "1", "--out", str(tmp_path)])
    found = results(tmp_path)
    assert found["data"]["test"] == 10_000
    assert found["students"]["kd"]["test_acc"][0] > 0.9
    assert found["students"]["kd"]["delta_vs_ce"]["mean"] is None  # there is no ce to compare with


@pytest.mark.slow
@pytest.mark.real_data
def test_a_subset_of_mnist_and_other_nets(data_root: Path, tmp_path: Path) -> None:
    flags = ["--data", "MNIST", "--data.root", str(data_root), "--data.train_size", "64", "--data.test_size", "20"]
    flags += ["--data.validation_size", "0", "--teacher", "ResNet", "--teacher.depth", "8", "--student", "Torchvision"]
    flags += ["--student.name", "resnet18", "--optimizer", "SGD", "--optimizer.lr", "0.01"]
    flags += ["--scheduler", "MultiStepLR", "--scheduler.milestones", "[1,2]", "--only", "ce", "kd", "t8"]
    flags += ["--variants.t8", "Hinton", "--variants.t8.temperature", "8", "--seeds", "[42]"]
    flags += ["--trainer.max_epochs", "1"]
    kd.main([*flags, "--out", str(tmp_path)])
    found = results(tmp_path)
    assert found["data"] == {"name": "MNIST", "train": 64, "validation": 0, "test": 20}
    assert set(found["students"]) == {"ce", "kd", "t8"}
    assert load_net(tmp_path / "seed42" / "t8")(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_a_failed_student_is_marked_and_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mymethod.py").write_text(
        "from lit_modules.objectives import CrossEntropy, Term\n"
        "class Explodes(CrossEntropy):\n"
        "    calls = 0\n"
        "    def forward(self, student, teacher, labels):\n"
        "        ce = super().forward(student, teacher, labels)['ce']\n"
        "        self.calls += self.training\n"
        "        return {'boom': Term(ce.values * (float('inf') if self.calls > 2 else 1), 1.0)}\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = ["--variants.bad", "mymethod.Explodes", "--only", "bad", "ce", "--trainer.max_epochs", "3", "--out", "run"]
    kd.main([*QUICK, *flags])
    bad = results(tmp_path / "run")["students"]["bad"]
    assert bad["failed"] == [{"step": 2, "term": "boom"}]
    assert bad["test_acc"] == bad["test_correct"] == [None]
    assert results(tmp_path / "run")["students"]["ce"]["test_correct"][0] > 36
    assert "boom" in capsys.readouterr().out


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("/tmp/apprentice_evil_ran",)


def write_truncated(path: Path) -> None:
    torch.save(net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-2000])


def write_spoilt(path: Path, value: float) -> None:
    weights = net().state_dict()
    weights["features.0.weight"][3, 0, 1, 1] = value
    torch.save(weights, path)


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "there is none"),
    "truncated": (write_truncated, "cut short"),
    "text": (lambda path: path.write_text("hello"), "no checkpoint"),
    "runs code": (lambda path: torch.save({"state_dict": Evil()}, path), "would run code"),
    "no weights": (lambda path: torch.save({"epoch": 3}, path), "no state dict"),
    "another shape": (lambda path: torch.save(net(num_classes=3).state_dict(), path), "classifier.3.weight"),
    "another net": (lambda path: torch.save(torch.nn.Linear(2, 2).state_dict(), path), "missing"),
    "not a number": (lambda path: write_spoilt(path, float("nan")), "features.0.weight has 1 of 144 that are NaN"),
    "infinite": (lambda path: write_spoilt(path, -float("inf")), "features.0.weight has 1 of 144 that are NaN or inf"),
    "integers": (
        lambda path: torch.save({key: value.int() for key, value in net().state_dict().items()}, path),
        "floats as weights; features.0.weight is int32",
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_teacher_that_cannot_be_loaded_is_refused_in_one_line(kind: str, tmp_path: Path, refusal: Refusal) -> None:
    write, said = CHECKPOINTS[kind]
    path = tmp_path / "teacher.pt"
    write(path)
    line = refusal(kd.main, *QUICK, "--teacher_ckpt", path)
    assert line.startswith(f"--teacher_ckpt {path}: expected")
    assert said in line
    assert not Path("/tmp/apprentice_evil_ran").exists()


STOP = "--trainer.callbacks EarlyStopping --trainer.callbacks.monitor loss --trainer.log_every_n_steps 2"


@pytest.mark.parametrize(
    "line", mostly_slow([STOP, "--trainer.log_every_n_steps 0", "--trainer.val_check_interval 2"], STOP)
)
def test_what_stages_log_is_monitored(line: str, tmp_path: Path) -> None:
    kd.main([*QUICK, "--data.train_size", "200", "--only", "kd", *line.split(), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "results.json").exists()


def test_an_extra_that_is_missing_is_named(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    line = refusal(kd.main, *QUICK, "--student", "Timm")
    assert line.startswith("--student timm")
    assert "it installed; the extra [timm] brings it: pip install" in line


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(kd.main, *QUICK, "--out", tmp_path / "file" / "run")
    assert line.startswith(f"--out {tmp_path}/file/run: expected a folder that can be written")


def test_a_full_disk_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    out, replace = tmp_path / "run", Path.replace

    def full(self: Path, target: Path) -> Path:
        if "kd" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    assert refusal(kd.main, *QUICK, "--only", "ce", "kd", "--out", out).startswith("no space left")
    monkeypatch.undo()
    trained = (out / "seed0" / "teacher" / "weights.pt").stat().st_mtime_ns
    kd.main(["--out", str(out), "--resume", "true"])
    assert set(results(out)["students"]) == {"ce", "kd"}
    assert (out / "seed0" / "teacher" / "weights.pt").stat().st_mtime_ns == trained
