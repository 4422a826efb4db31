"""The main job, end to end: on real data, on several processes, and with input that can't be used."""

import errno
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apprentice.errors import BadInput
from datamodules import Digits
from experiments import hardware, kd
from harness.runs.environment import limit_threads
from harness.runs.nets import load_net
from lit_modules.nets import LightNN
from lit_modules.nets.weights import load_weights
from tests import waiting
from tests.commands import left_by_overwriting, refused, results
from tests.grids import mostly_slow
from tests.processes import Run
from tests.training import assert_same, net

QUICK = ["--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "150"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kd") / "run"
    kd.main([*QUICK, "--seeds", "2", "--only", "ce", "kd", "--out", str(out)])
    return out


def test_a_run_leaves_what_the_issue_names(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(finished)
    assert found["experiment"] == "kd"
    assert found["data"] == {"name": "Digits", "train": 150, "validation": 15, "test": 360}
    assert found["seeds"] == [0, 1]
    for entry in [found["teacher"], *found["students"].values()]:
        assert len(entry["test_acc"]) == len(entry["test_correct"]) == 2
        assert [c / 360 for c in entry["test_correct"]] == pytest.approx(entry["test_acc"])
        assert entry["step_ms"] > 0
        assert entry["train_flops"] > 0
    assert found["students"]["ce"]["objective"] == "CrossEntropy"
    assert "- Data: Digits: 150 train, 15 validation, 360 test samples\n" in (finished / "results.md").read_text()
    assert "- kd: Hinton(temperature=2.0, kd_weight=0.25, ce_weight=0.75)\n" in (finished / "results.md").read_text()
    (call,) = json.loads((finished / "environment.json").read_text())["calls"]
    flags = "--teacher LightNN --seeds 1 --trainer.max_epochs 1 --data.train_size 150 --seeds 2 --only ce kd --out"
    assert call["command"] == f"kd.py {flags} {finished}"
    assert found["commits"] == [call["commit"] and call["commit"] + "-dirty" * call["dirty"]]
    assert len(found["students_fit_seconds"]) == 2
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
    first, second = 64 * 16 * 9, 16 * 16 * 16 * 9
    dense = 16 * 4 * 256 + 256 * 10
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


def test_a_loaded_teacher_is_one_for_all_seeds_or_one_a_seed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results(finished)["teacher"]["test_correct"]
    given = {"one": finished / "seed1" / "teacher" / "weights.pt", "each": finished / "seed{seed}/teacher/weights.pt"}
    for name, path in given.items():
        flags = [*QUICK, "--seeds", "2", "--only", "ce", "--teacher_ckpt", str(path)]
        kd.main([*flags, "--out", str(tmp_path / name)])
    one, each = (results(tmp_path / name)["teacher"] for name in given)
    assert (one["nets"], one["test_correct"]) == (1, [before[1]] * 2)
    assert (each["nets"], each["test_correct"]) == (2, before)
    told = {name: (tmp_path / name / "results.md").read_text() for name in given}
    rows = {name: next(line for line in text.splitlines() if "| teacher" in line) for name, text in told.items()}
    assert "±" not in rows["one"]
    assert "±" in rows["each"]
    assert "teacher: one net, tested once" in told["one"]
    missing = str(given["each"]).replace("{seed}", "2")
    flags = [*QUICK, "--seeds", "3", "--teacher_ckpt", str(given["each"])]
    refused(kd.main, flags, f"--teacher_ckpt {missing}: expected", "there is none", tmp_path, capsys)


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
    flags = [*QUICK, "--student", "tests.experiments.test_kd.Strangers", "--variants.again", "CrossEntropy"]
    kd.main([*flags, "--only", "ce", "again", "--out", str(tmp_path / "run")])
    ce, again = (torch.load(tmp_path / "run" / "seed0" / name / "weights.pt") for name in ("ce", "again"))
    assert_same(ce, again)


@pytest.mark.parametrize(("main", "flag"), [(kd.main, "teacher"), (kd.main, "student"), (hardware.main, "net")])
def test_nets_whose_first_weights_do_not_follow_from_the_seed_are_refused(
    main: Callable[..., None], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{flag}", "tests.experiments.test_kd.Strangers", f"--{flag}.source", "entropy"]
    said = "two made with one seed differ in features.0.weight"
    refused(main, flags, f"--{flag} Strangers: expected a net whose first weights come", said, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8])
def test_the_table_in_float64_is_that_of_one_process(devices: int, tmp_path: Path) -> None:
    tables = []
    for n in (1, devices):
        out = tmp_path / str(n)
        flags = ["--trainer.precision", "64-true", "--trainer.devices", str(n), "--data.batch_size", "67"]
        run = Run(kd.main, [*QUICK, *flags, "--trainer.max_epochs", "4", "--out", str(out)], log=tmp_path / "log")
        assert run.wait() == 0, run.output
        found = results(out)
        tables.append({n: e["test_correct"] for n, e in {**found["students"], "teacher": found["teacher"]}.items()})
    assert tables[0] == tables[1]
    assert len(tables[0]) == 5


@pytest.mark.slow
def test_an_exact_pipeline_gives_the_very_table_of_one_device(tmp_path: Path) -> None:
    found = []
    for devices, strategy in ((1, "ddp"), (2, "pipeline")):
        out = tmp_path / str(devices)
        flags = ["--exact", "8", "--trainer.strategy", strategy, "--trainer.devices", str(devices), "--out", str(out)]
        run = Run(kd.main, [*QUICK, *flags, "--trainer.max_epochs", "3"], log=tmp_path / "log")
        assert run.wait() == 0, run.output
        table = results(out)
        table["students"]["teacher"] = table["teacher"]
        timeless = {"step_ms": None, "fit_seconds": None}
        rows = {name: row | timeless for name, row in table["students"].items()}
        files = {name: (out / "seed0" / name / "weights.pt").read_bytes() for name in rows}
        found.append((rows, files))
    assert found[0] == found[1]
    assert len(found[0][1]) == 5


@pytest.mark.slow
def test_under_torchrun_the_ranks_share_one_run(tmp_path: Path) -> None:
    flags = [*QUICK, "--trainer.precision", "64-true", "--only", "ce", "kd", "--trainer.devices"]
    kd.main([*flags, "1", "--out", str(tmp_path / "alone")])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
    ]
    launched = subprocess.run(
        [*command, str(Path(kd.__file__)), *flags, "2"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=waiting.LIMIT, check=False,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
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
    flags = [
        "--data",
        "ImageFolder",
        "--data.root",
        str(tmp_path / "cifar10"),
        "--data.validation_size",
        "0",
        "--seeds",
        "1",
    ]
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
    flags += [
        "--variants.t8",
        "Hinton",
        "--variants.t8.temperature",
        "8",
        "--seeds",
        "[42]",
        "--trainer.max_epochs",
        "1",
    ]
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


def write_evil(path: Path) -> None:
    torch.save({"state_dict": Evil()}, path)


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
    "runs code": (write_evil, "would run code"),
    "no weights": (lambda path: torch.save({"epoch": 3}, path), "no state dict"),
    "another shape": (
        lambda path: torch.save(LightNN((1, 8, 8), num_classes=3).state_dict(), path),
        "classifier.3.weight",
    ),
    "another net": (lambda path: torch.save(torch.nn.Linear(2, 2).state_dict(), path), "missing"),
    "not a number": (lambda path: write_spoilt(path, float("nan")), "features.0.weight has 1 of 144 that are NaN"),
    "infinite": (lambda path: write_spoilt(path, -float("inf")), "features.0.weight has 1 of 144 that are NaN or inf"),
    "integers": (
        lambda path: torch.save({key: value.int() for key, value in net().state_dict().items()}, path),
        "floats as weights; features.0.weight is int32",
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_teacher_that_cannot_be_loaded_is_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, said = CHECKPOINTS[kind]
    path = tmp_path / "teacher.pt"
    write(path)
    refused(kd.main, [*QUICK, "--teacher_ckpt", str(path)], f"--teacher_ckpt {path}: expected", said, tmp_path, capsys)
    assert not Path("/tmp/apprentice_evil_ran").exists()


STOP = "--trainer.callbacks EarlyStopping --trainer.callbacks.monitor loss --trainer.log_every_n_steps 2"


@pytest.mark.parametrize(
    "line", mostly_slow([STOP, "--trainer.log_every_n_steps 0", "--trainer.val_check_interval 2"], STOP)
)
def test_what_stages_log_is_monitored(line: str, tmp_path: Path) -> None:
    kd.main([*QUICK, "--data.train_size", "200", "--only", "kd", *line.split(), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "results.json").exists()


def test_an_extra_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    said = "it installed; the extra [timm] brings it: pip install"
    refused(kd.main, [*QUICK, "--student", "Timm"], "--student timm", said, tmp_path, capsys)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        kd.main([*QUICK, "--out", str(tmp_path / "file" / "run")])
    assert stop.value.code == 2
    assert f"error: --out {tmp_path}/file/run: expected a folder that can be written" in capsys.readouterr().err


def test_a_full_disk_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, replace = tmp_path / "run", Path.replace

    def full(self: Path, target: Path) -> Path:
        if "kd" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SystemExit) as stop:
        kd.main([*QUICK, "--only", "ce", "kd", "--out", str(out)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no space left")
    assert error.count("\n") == 1
    monkeypatch.undo()
    trained = (out / "seed0" / "teacher" / "weights.pt").stat().st_mtime_ns
    kd.main(["--out", str(out), "--resume", "true"])
    assert set(results(out)["students"]) == {"ce", "kd"}
    assert (out / "seed0" / "teacher" / "weights.pt").stat().st_mtime_ns == trained


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}])
@pytest.mark.parametrize("prefix", ["", "module.", "net."])
def test_weights_load_from_what_others_write(wrap: Callable[[Any], Any], prefix: str, tmp_path: Path) -> None:
    source, target = net(seed=1), net(seed=2)
    torch.save(wrap({f"{prefix}{k}": v for k, v in source.state_dict().items()}), tmp_path / "w.pt")
    load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")
    assert_same(source.state_dict(), target.state_dict())


def test_weights_that_have_too_much_are_refused(tmp_path: Path) -> None:
    torch.save(net().state_dict() | {"extra": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(BadInput, match="extra"):
        load_weights(net(), str(tmp_path / "w.pt"), "teacher_ckpt")
