"""A run goes on with the samples with which it began, wherever they lie now; others are refused before any training."""

import json
import shutil
from pathlib import Path

import pytest

from datamodules import ImageFolder, fingerprints
from experiments import compare, kd, quantize
from harness.runs import folders
from harness.runs.files import write_json
from harness.runs.folders import check_samples
from tests.commands import Refusal, bad_input, results
from tests.datamodules.test_image_folder import picture

FLAGS = [
    "--data", "ImageFolder", "--teacher", "LightNN", "--only", "ce", "--trainer.max_epochs", "1", "--seeds", "1",
    "--trainer.logger", "false",
]  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, and a finished run of theirs."""
    folder = tmp_path_factory.mktemp("begun")
    for part, count in (("train", 10), ("test", 4)):
        for number in range(2 * count):
            picture(folder / "set" / part / "ab"[number % 2] / f"{number}.bmp", number, (8, 8))
    kd.main([*FLAGS, "--data.root", str(folder / "set"), "--out", str(folder / "run")])
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    """A copy of both, with other times, at another place."""
    return Path(shutil.copytree(begun, tmp_path / "copy", copy_function=shutil.copyfile))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}


def test_a_copy_elsewhere_is_the_same_data(folder: Path) -> None:
    before = results(folder / "run")
    flags = ["--out", str(folder / "run"), "--resume", "true", "--data.root", str(folder / "set"), "--seeds", "2"]
    kd.main(flags)
    after = results(folder / "run")
    assert after["students"]["ce"]["test_acc"][0] == before["students"]["ce"]["test_acc"][0]
    described = json.loads((folder / "run/data.json").read_text())
    assert after["fingerprint"] == before["fingerprint"] == described["fingerprint"]
    assert after["config"]["data"]["init_args"]["root"] == str(folder / "set")


MORE = {
    "resumed": [],
    "seeds": ["--seeds", "2"],
    "students": ["--only", "ce", "hint"],
    "epochs": ["--trainer.max_epochs", "2"],
}


@pytest.mark.parametrize("more", MORE)
def test_other_data_are_refused(folder: Path, more: str, refusal: Refusal) -> None:
    picture(folder / "set/train/a/new.bmp", 50, (8, 8))
    picture(folder / "set/test/b/1.bmp", 51, (8, 8))
    before = files(folder / "run")
    flags = ["--out", str(folder / "run"), "--resume", "true", "--data.root", str(folder / "set"), *MORE[more]]
    assert refusal(kd.main, *flags) == (
        f"--data ImageFolder: expected the samples with which the run in {folder / 'run'} began; others are in "
        "train (18 then, 19 now), validation (2 then and now), test (8 then and now): take another --out"
    )
    assert files(folder / "run") == before


def test_samples_of_a_drawn_split_are_named(tmp_path: Path) -> None:
    """Where split.csv has the names, the message says which are new or gone, and else that the content is another."""
    (tmp_path / "split.csv").write_text("split,path,label\ntrain,a/1.png,a\ntrain,a/2.png,a\ntest,b/3.png,b\n")
    write_json(tmp_path / "data.json", {"name": "X", "samples": {"train": 2}, "fingerprint": {"train": "old"}})
    now = {"name": "X", "samples": {"train": 2}, "fingerprint": {"train": "new"}}
    same = [("train", "a/1.png", "a"), ("train", "a/2.png", "a"), ("test", "b/3.png", "b")]
    started = (
        f"data X: expected the samples with which the run in {tmp_path} began; others are in train (2 then and now)"
    )
    line = bad_input(check_samples, tmp_path, now, listed=same)
    assert line == f"{started}; of the names in split.csv, whose content is another: take another `out`"
    other = [*same[1:], *(("train", f"a/{number}.png", "a") for number in (4, 5, 6, 7))]
    line = bad_input(check_samples, tmp_path, now, listed=other)
    named = "gone are a/1.png of train; new are a/4.png of train, a/5.png of train, a/6.png of train and 1 more"
    assert line == f"{started}; {named}: take another `out`"


def test_other_times_of_a_large_set_are_told(
    begun: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fingerprints, "READ", 10)
    before, now = (folders.describe_samples(ImageFolder(place / "set")) for place in (begun, folder))
    write_json(tmp_path / folders.SAMPLES, before)
    folders.check_samples(tmp_path, before)
    assert capsys.readouterr().out == ""
    folders.check_samples(tmp_path, now)
    assert capsys.readouterr().out == (
        "ImageFolder: files of train, validation, test have other times than when the run began; names and sizes are "
        "the same, and the content of 1024 files of each\n"
    )


def test_runs_of_other_data_are_not_one_table(
    folder: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    picture(folder / "set/test/b/1.bmp", 51, (8, 8))
    run, other = folder / "run", folder / "other"
    flags = [*FLAGS, "--data.root", str(folder / "set"), "--out", str(other)]
    kd.main([*flags, "--seeds", "[0,1]"])
    capsys.readouterr()
    compare.main([str(run), str(other), "--out", str(folder / "compared")])
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "other is not compared with run/ce: other data (other samples in test)." in shown
    kd.main([*flags, "--seeds", "[1]", "--overwrite", "true"])
    line = refusal(compare.main, "--pool", run, other, "--out", folder / "pooled")
    assert line.endswith("differs from run in its seeds alone; test: the samples are others")


@pytest.mark.extras
def test_a_student_is_quantised_on_the_samples_of_its_run(begun: Path, folder: Path, refusal: Refusal) -> None:
    run, settings = folder / "run", folder / "run/config.yaml"
    settings.write_text(settings.read_text().replace(str(begun), str(folder)))
    picture(folder / "set/train/a/new.bmp", 50, (8, 8))
    line = refusal(quantize.main, "--run", run / "seed0/ce", "--out", folder / "int8")
    assert line.startswith(f"--data ImageFolder: expected the samples with which the run in {run} began")
    assert line.endswith("train (18 then, 19 now), validation (2 then and now): train a student of these")
    assert not (folder / "int8").exists()
