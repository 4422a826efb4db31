"""predict.py: a table for images and texts of any layout, the same bytes on any number of processes."""

import contextlib
import csv
import itertools
import os
import shutil
import signal
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as transforms

from apprentice.errors import BadInput
from datamodules.preparation import Preparation
from deploy.predict.inputs import Inputs, read_inputs
from deploy.predict.predictor import Predictor
from deploy.predict.raw import fit
from experiments import kd, predict
from harness.reports.samples import unpack_classes
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from lit_modules.nets import LightNN, RNNClassifier
from tests.commands import Refusal, results
from tests.launching import until
from tests.net_facts import facts
from tests.processes import Run
from tests.training import SHAPE, net

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = spec("lit_modules.nets.LightNN", {"input_shape": SHAPE})
Rows = list[dict[str, str]]


def draw(folder: Path, names: list[str], size: tuple[int, int] = (8, 8)) -> None:
    generator = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(*size, 3), dtype=np.uint8)).save(folder / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A net, never trained, beside 13 images, one of them damaged, and other files."""
    save_net(net(LightNN), SPEC, tmp_path / "seed0" / "kd", facts())
    draw(tmp_path / "images", [f"{number}.png" for number in range(12)])
    (tmp_path / "images" / "5b.png").write_text("no image")
    (tmp_path / "images" / "notes.txt").write_text("a note")
    return tmp_path


def call(folder: Path, *flags: str, code: int = 0, inputs: str = "images") -> tuple[str, Rows]:
    """What the command says, and the table that it leaves."""
    command = ["--run", str(folder / "seed0" / "kd"), "--inputs", str(folder / inputs), "--num_workers", "0"]
    out = folder / "out.csv"
    run = Run(predict.main, [*command, "--out", str(out), "--overwrite", "true", *flags], log=folder / "log")
    run.log.write_text("")
    said = run.check(code)
    with out.open(newline="") as file:
        return said, list(csv.DictReader(file))


def test_a_table_is_what_the_net_says_of_each_input_once_and_in_order(folder: Path) -> None:
    said, rows = call(folder, "--top", "3", "--batch_size", "5", code=1)
    names = sorted(path.name for path in (folder / "images").glob("*.png"))
    assert [row["file"] for row in rows] == names
    titles = [("class", "probability"), ("class_2", "probability_2"), ("class_3", "probability_3")]
    assert list(rows[0]) == ["file", *(title for pair in titles for title in pair)]
    assert "skipped: 1 .txt\n" in said
    assert "1 of 13 inputs can't be read; their lines are empty:\n  5b.png: expected an image that can be read" in said
    whole = [name for name in names if name != "5b.png"]
    pixels = [np.array(Image.open(folder / "images" / name).convert("L")) for name in whole]
    images = (torch.from_numpy(np.stack(pixels))[:, None].float() / 255 - 0.3) / 0.4
    read = [row for row in rows if row["file"] != "5b.png"]
    with torch.no_grad():
        best = load_net(folder / "seed0" / "kd")(images).softmax(1).topk(3)
    for k, (label, probability) in enumerate(titles):
        assert [row[label] for row in read] == [str(number) for number in best.indices[:, k].tolist()]
        found = torch.tensor([float(row[probability]) for row in read])
        torch.testing.assert_close(found, best.values[:, k], rtol=0, atol=1e-6)
    (damaged,) = (row for row in rows if row["file"] == "5b.png")
    assert set(damaged.values()) == {"5b.png", ""}


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_processes_writes_the_same_bytes(devices: int, folder: Path) -> None:
    call(folder, "--batch_size", "3", code=1)
    alone = (folder / "out.csv").read_bytes()
    (folder / "out.csv").unlink()
    call(folder, "--batch_size", "3", "--trainer.devices", str(devices), "--num_workers", "1", code=1)
    assert (folder / "out.csv").read_bytes() == alone
    assert not list(folder.glob(".out*"))


def test_labels_are_folders_or_a_column_and_are_scored(folder: Path) -> None:
    draw(folder / "labelled", ["1/a.png", "1/b.png", "7/c.png", "other/d.png"])
    said, rows = call(folder, inputs="labelled")
    assert [row["label"] for row in rows] == ["1", "1", "7", ""]
    right = sum(row["class"] == row["label"] for row in rows)
    assert f"accuracy {100 * right / 3:.2f} % ({right} of 3)" in said
    assert "top-5 accuracy" in said
    table = [f"labelled/{row['file']},{row['label']}" for row in rows[::-1]]
    (folder / "table.csv").write_text("\n".join(["path,label", *table]) + "\n")
    again, ordered = call(folder, inputs="table.csv")
    assert next(line for line in again.splitlines() if "accuracy" in line) in said
    assert [row["file"] for row in ordered] == [f"labelled/{row['file']}" for row in rows[::-1]]
    assert [row["probability"] for row in ordered] == [row["probability"] for row in rows[::-1]]


def test_a_set_that_a_run_was_tested_on_has_its_accuracy(tmp_path: Path) -> None:
    parts = itertools.product(("train", "test"), "ab", range(9))
    draw(tmp_path / "photos", [f"{part}/{kind}/{number}.png" for part, kind, number in parts], (11, 9))
    sizes = ["--data.root", str(tmp_path / "photos"), "--data.image_size", "8", "--data.batch_size", "4"]
    nets = ["--teacher", "LightNN", "--only", "ce", "--seeds", "1", "--trainer.max_epochs", "1"]
    kd.main(["--data", "ImageFolder", *sizes, *nets, "--out", str(tmp_path / "run")])
    (tmp_path / "seed0").mkdir()
    (tmp_path / "seed0" / "kd").symlink_to(tmp_path / "run" / "seed0" / "ce")
    said, rows = call(tmp_path, inputs="photos/test")
    student = results(tmp_path / "run")["students"]["ce"]
    assert f"({student['test_correct'][0]} of 18)" in said
    numbers = unpack_classes(student["test_predicted"][0])
    assert [row["class"] for row in rows] == ["ab"[number] for number in numbers]


@pytest.mark.parametrize("size", [(8, 8), (30, 20), (20, 31), (9, 8), (5, 7)])
def test_images_are_fitted_as_in_training(size: tuple[int, int], tmp_path: Path) -> None:
    draw(tmp_path, ["image.png"], size)
    image = Image.open(tmp_path / "image.png")
    expected = transforms.center_crop(transforms.resize(image, 8), [8, 8])
    assert np.array_equal(np.array(fit(image, 8, 8)), np.array(expected))
    assert fit(image, 6, 9).size == (9, 6)


def save_words(folder: Path) -> None:
    known = facts(inputs=Preparation(kind="bytes", shape=(6,)), classes=("neg", "pos"))
    arguments: dict[str, Any] = {"input_shape": (6,), "num_classes": 2, "vocab_size": 256}
    save_net(
        RNNClassifier(**arguments), spec("lit_modules.nets.RNNClassifier", arguments), folder / "seed0" / "kd", known
    )


TEXTS: dict[str, Callable[[Path], object]] = {
    "lines": lambda path: path.write_text("good\n\nbad one that is long\n"),
    "tabs": lambda path: path.write_text("pos\tgood\nneg\tbad one that is long\n"),
    "table.csv": lambda path: path.write_text("text,label\ngood,pos\nbad one that is long,neg\n"),
}


@pytest.mark.parametrize("layout", TEXTS)
def test_texts(layout: str, tmp_path: Path) -> None:
    save_words(tmp_path)
    TEXTS[layout](tmp_path / layout)
    said, rows = call(tmp_path, inputs=layout)
    with torch.no_grad():
        tokens = torch.tensor([[*b"good\0\0"], [*b"bad on"]])
        expected = load_net(tmp_path / "seed0" / "kd")(tokens).softmax(1)
    found = torch.tensor([float(row["probability"]) for row in rows])
    torch.testing.assert_close(found, expected.amax(1), rtol=0, atol=1e-6)
    assert [row["class"] for row in rows] == [["neg", "pos"][number] for number in expected.argmax(1).tolist()]
    assert ("label" in rows[0]) == ("accuracy" in said) == (layout != "lines")


def test_a_file_s_name_that_is_no_utf8_is_written_as_it_is(folder: Path) -> None:
    draw(folder / "odd", [os.fsdecode(b"\xff.png")])
    with contextlib.suppress(UnicodeDecodeError):  # of the reader here
        call(folder, inputs="odd")
    assert b"\n\xff.png," in (folder / "out.csv").read_bytes()


def bytes_inputs(place: Path) -> Inputs:
    return read_inputs(place, Preparation(kind="bytes", shape=(6,)), ("neg", "pos"))


def test_an_odd_line_among_labelled_ones_is_refused_and_few_labels_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for odd, says in (("bad\tone", "it has bad"), ("no label", "it has no tab")):
        (tmp_path / "lines").write_text(f"pos\tgood\nneg\tbad\n\n{odd}\n")
        with pytest.raises(BadInput, match=f"lines:4: expected one of the net's classes before a tab.*{says}"):
            bytes_inputs(tmp_path / "lines")
    (tmp_path / "lines").write_text("pos\tgood\nbad\nworse\n")
    assert bytes_inputs(tmp_path / "lines").texts == [b"pos\tgood", b"bad", b"worse"]
    assert "1 of 3 lines begin with a class and a tab" in capsys.readouterr().out


def test_a_table_keeps_its_cells_whatever_program_wrote_it(tmp_path: Path) -> None:
    cells = ["good\nmovie", " a\u2028b", "c\x0bd\x85e", "f;g"]
    with (tmp_path / "table.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=";").writerows([["Text", "Category"], *([cell, "pos "] for cell in cells)])
    inputs = bytes_inputs(tmp_path / "table.csv")
    assert [text.decode() for text in inputs.texts] == cells
    assert inputs.labels == ["pos"] * 4


def wrong_flags(folder: Path) -> Iterator[tuple[list[str], str]]:
    run, images = str(folder / "seed0" / "kd"), str(folder / "images")
    (folder / "empty").mkdir()
    (folder / "taken.csv").write_text("file,class,probability\n")
    os.mkfifo(folder / "pipe")
    (folder / "link.csv").symlink_to(folder / "taken.csv")
    (folder / "rows.csv").write_text("file,label\nimages/0.png,mouse\n")
    (folder / "columns.csv").write_text("a,b\n1,2\n")
    save_net(net(LightNN), SPEC, folder / "old")
    known = ["--run", run, "--out", str(folder / "new.csv")]
    yield ["--inputs", images, *known, "--run", str(folder)], f"there: {folder / 'old'}, {run}"
    yield ["--inputs", images, *known, "--run", str(folder / "old")], "this one is of an older version"
    yield ["--inputs", images], "--run (nothing): expected a net's folder"
    yield known, "--inputs (nothing): expected a folder of images or texts"
    yield [*known, "--inputs", str(folder / "empty")], "it is empty"
    yield [*known, "--inputs", str(folder / "nowhere")], "there is none"
    yield [*known, "--inputs", str(folder / "images" / "notes.txt")], "there: 1 .txt"
    yield [*known, "--inputs", str(folder / "rows.csv")], "rows.csv:2: expected one of the net's classes"
    yield [*known, "--inputs", str(folder / "columns.csv")], "it has a, b"
    yield [*known, "--inputs", images, "--out", str(folder / "taken.csv")], "a new file; or --overwrite true"
    yield [*known, "--inputs", images, "--out", str(folder)], "this is a folder"
    for name in ("seed0/kd/net.yaml", "rows.csv", "pipe", "link.csv"):
        replaced = ["--out", str(folder / name), "--overwrite", "true"]
        yield [*known, "--inputs", images, *replaced], "a new file, or a table of predictions, which is replaced"
    itself = ["--inputs", str(folder / "taken.csv"), "--out", str(folder / "taken.csv"), "--overwrite", "true"]
    yield [*known, *itself], "another file than --inputs, which it would replace"
    yield [*known, "--inputs", images, "--out", "/proc/new.csv"], "a file in a folder that can be written"
    yield [*known, "--inputs", images, "--out", "null"], "--out null: expected a file, as predictions.csv"
    idle = "--trainer.max_epochs 3: not allowed, as predictions are made in one pass, by a trained net"
    yield [*known, "--inputs", images, "--trainer.max_epochs", "3"], idle
    yield [*known, "--inputs", images, "--trainer.strategy", "pipeline"], "ddp, or a single device"
    yield [*known, "--inputs", images, "--top", "0"], "--top 0"


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_prediction_that_is_stopped_says_so_and_leaves_nothing(devices: str, folder: Path) -> None:
    begun, temporary = folder / "begun", Path(tempfile.mkdtemp())  # short: sockets in it have 108 characters at most
    stays = {path.name for path in folder.iterdir()}

    def main() -> None:
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # a fork's exit functions are cleared
        warnings.simplefilter("ignore", ResourceWarning)  # as Python does: they are removed at exit
        tempfile.tempdir = str(temporary)

        def wait(*_: Any) -> None:
            begun.touch()
            time.sleep(60)

        Predictor.predict_step = wait  # type: ignore[assignment]
        given = ["--run", str(folder / "seed0" / "kd"), "--inputs", str(folder / "images"), "--num_workers", "1"]
        predict.main([*given, "--out", str(folder / "out.csv"), "--trainer.devices", devices])

    run = Run(main, log=folder / "log")
    until(begun.exists, run)
    run.process.terminate()
    *_, last = run.check(128 + signal.SIGTERM).splitlines()
    assert (last, run.output.count("\n")) == (f"stopped; {folder / 'out.csv'} is not written", 3)
    assert {path.name for path in folder.iterdir()} == stays | {"log", "begun"}
    assert not [*temporary.glob("tmp*")]
    shutil.rmtree(temporary)


def test_what_can_not_be_predicted_is_one_line(folder: Path, refusal: Refusal) -> None:
    for flags, says in wrong_flags(folder):
        line = refusal(predict.main, *flags)
        assert says in line, line
    assert not (folder / "new.csv").exists()
