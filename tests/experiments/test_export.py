"""A student that leaves: files that answer where this project is not, the card."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision import models

from apprentice.errors import BadInput
from datamodules.preparation import Kind, Preparation
from deploy import card, students, writers
from deploy import export as exports
from deploy.export import TEMPLATES, export_net
from deploy.export_folder import FOLDER, ONNX, PROGRAM, metadata
from deploy.int8.options import data_of_run
from deploy.net_path import net_path, teachers_beside
from experiments import export, kd, predict
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from lit_modules.nets import LightNN, RNNClassifier, Torchvision
from tests.commands import Refusal, results, start
from tests.deploy import exporting
from tests.deploy.test_predict import draw
from tests.net_facts import facts
from tests.processes import Run
from tests.training import SHAPE, net

ROOT = Path(__file__).parents[2]
FILES = [file.name for file in FOLDER]
PROJECT = ("apprentice", "deploy", "lit_modules", "datamodules", "strategies", "harness", "lab", "experiments")
# Python without `site`, so without the .pth file that leads to an editable install of this project.
ELSEWHERE = f"""
import importlib.util, runpy, sys
sys.path.append({sysconfig.get_path("purelib")!r})
assert not [name for name in {PROJECT!r} if importlib.util.find_spec(name)]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = pytest.mark.usefixtures("one_thread")
FLAGS = ["--seeds", "2", "--trainer.max_epochs", "1", "--only", "ce", "kd", "--data.train_size", "200"]


def elsewhere(script: Path, *arguments: str) -> str:
    """What a script prints in a process that can't import this project."""
    command = [sys.executable, "-I", "-S", "-c", ELSEWHERE, str(script), *arguments]
    done = subprocess.run(
        command, cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.extras
def test_a_run_s_students_leave_as_folders_that_answer_without_this_project(tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    Run(kd.main, [*FLAGS, "--out", str(run), "--export", str(exported)], log=tmp_path / "log").check()
    assert sorted(path.name for path in exported.iterdir()) == ["ce", "kd"]
    assert {path.name for path in (exported / "kd").iterdir()} == set(FILES)
    draw(tmp_path / "images", ["a.png", "b.png", "c.png"], (9, 12))
    images = sorted((tmp_path / "images").iterdir())
    given = [
        "--run",
        str(run / "seed0" / "kd"),
        "--inputs",
        str(tmp_path / "images"),
        "--out",
        str(tmp_path / "out.csv"),
    ]
    Run(predict.main, [*given, "--top", "1"], log=tmp_path / "predicted").check()
    expected = [line.split(",")[1:] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]]
    printed = [line.split("\t") for line in elsewhere(exported / "kd" / "use.py", *map(str, images)).splitlines()]
    assert [Path(name).name for name, *_ in printed] == [path.name for path in images]
    assert [label for _, label, _ in printed] == [label for label, _ in expected]
    for (_, _, share), (_, probability) in zip(printed, expected, strict=True):
        assert float(share) == pytest.approx(float(probability), abs=6e-5)
    assert (exported / "kd" / "labels.txt").read_text().split() == [*"0123456789"]
    (tmp_path / "all.py").write_text(LOADS_ALL)
    logits = json.loads(elsewhere(tmp_path / "all.py", str(exported / "kd")))
    plain = load_net(run / "seed0" / "kd")(torch.linspace(-1, 1, 128).view(2, 1, 8, 8))
    torch.testing.assert_close(torch.tensor(logits), plain.detach(), rtol=0, atol=1e-5)
    flags = ["--resume", "true", "--export", str(exported)]
    again = start(run, *flags, before=exporting.read_here)
    assert f"{exported}/kd: README.md" in again.check()


LOADS_ALL = """
import json, sys, torch
from safetensors.torch import load_file
folder = sys.argv[1]
assert load_file(f"{folder}/weights.safetensors")
net = torch.export.load(f"{folder}/model.pt2").module()
print(json.dumps(net(torch.linspace(-1, 1, 128).view(2, 1, 8, 8)).tolist()))
"""


@pytest.mark.slow
@pytest.mark.extras
def test_texts_and_torchvision_s_nets_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts(inputs=Preparation(kind="bytes", shape=(6,)), classes=("neg", "pos"))
    arguments: dict[str, Any] = {"input_shape": (6,), "num_classes": 2}
    save_net(RNNClassifier(**arguments), spec("lit_modules.nets.RNNClassifier", arguments), tmp_path / "words", known)
    assert export_net(tmp_path / "words", tmp_path / "exported") == {}
    with torch.no_grad():
        tokens = torch.tensor([[*b"good\0\0"], [*b"bad on"]])
        best = load_net(tmp_path / "words")(tokens).softmax(1).max(1)
    lines = elsewhere(tmp_path / "exported" / "use.py", "good", "bad one").splitlines()
    for line, text, share, number in zip(lines, ("good", "bad one"), best.values, best.indices, strict=True):
        assert line == f"{text}\t{known.classes[number]}\t{float(share):.4f}"
    arguments = {"name": "squeezenet1_1", "input_shape": (3, 32, 32), "num_classes": 3}
    image = Preparation(kind="images", shape=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    ours = Torchvision(**arguments)
    save_net(ours, spec("lit_modules.nets.Torchvision", arguments), tmp_path / "net", facts(inputs=image, classes=()))
    exporting.read_here(monkeypatch)
    assert export_net(tmp_path / "net", tmp_path / "plain") == {}
    from safetensors.torch import load_file

    models.squeezenet1_1(num_classes=3).load_state_dict(load_file(tmp_path / "plain" / "weights.safetensors"))
    assert (tmp_path / "plain" / "labels.txt").read_text() == "0\n1\n2\n"


def test_a_card_says_from_what_how_good_and_at_what_cost(tmp_path: Path) -> None:
    kd.main([*FLAGS, "--out", str(tmp_path / "run")])
    known = results(tmp_path / "run")
    written = card.model_card(tmp_path / "run" / "seed1" / "kd", facts(commit="abc"), 21690)
    head = yaml.safe_load(written.split("---\n")[1])
    assert (head["pipeline_tag"], head["metrics"]) == ("image-classification", ["accuracy"])
    (scored,) = head["model-index"][0]["results"]
    expected = {"type": "accuracy", "name": "test accuracy", "value": known["students"]["kd"]["test_acc"][1]}
    assert scored["metrics"] == [expected]
    page = (tmp_path / "run" / "results.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| (teacher|ce|kd) ", line)]
    assert len(rows) >= 3
    assert all(row in written for row in rows[:3])
    sizes = f"Digits: {known['data']['train']} train, {known['data']['validation']} validation, 360 test samples."
    for part in (sizes, "Hinton(temperature=", "## Cost", "abc", "21,690"):
        assert part in written, part
    assert re.search(r"Difference to ce, with its 95 % interval over seeds: [-+0-9.]+ \[", written)
    assert "kd.main" not in written
    save_net(
        net(LightNN), spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), tmp_path / "a" / "b" / "c", facts()
    )
    assert "The run left no table of results." in card.model_card(tmp_path / "a" / "b" / "c", facts(), 3)


def test_a_moving_average_is_of_its_student_s_run_and_has_its_own_score(tmp_path: Path) -> None:
    plain, folder = spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), tmp_path / "run" / "seed0" / "kd"
    for place in (folder, folder / "ema", folder.parent / "ema"):
        save_net(net(LightNN), plain, place, facts())
    assert net_path(folder / "ema") == (tmp_path / "run", "seed0", "kd", True)
    assert net_path(folder.parent / "ema") == (tmp_path / "run", "seed0", "ema", False)  # a student of that name
    assert teachers_beside(folder / "ema") == teachers_beside(folder) == {folder.parent / "teacher": 1.0}
    (tmp_path / "run" / "config.yaml").write_text("data: {train_size: 7}\n")
    assert data_of_run(["--run", str(folder / "ema")], None, object) == {"train_size": 7}
    scores = {"test_acc": [0.5], "test_ema_acc": [0.75]}
    metric = SimpleNamespace(name="test_acc", score="acc")
    of_run: Any = SimpleNamespace(metric=metric, nets={"kd": SimpleNamespace(scores=scores)}, seeds=[0])
    assert [card._score(net_path(place), of_run) for place in (folder, folder / "ema")] == [0.5, 0.75]
    assert "# kd: LightNN, moving average of weights" in card.model_card(folder / "ema", facts(), 3)


def test_a_card_calls_each_teacher_one() -> None:
    for name, says in (("teacher-big", "was trained as a teacher"), ("kd", "is a student of a comparison")):
        assert says in card._lead(name, "LightNN", facts(), 3, None)


def test_how_to_use_a_folder_takes_fifteen_lines() -> None:
    for kind in get_args(Kind):
        lines = (TEMPLATES / f"{kind}.py.txt").read_text().splitlines()
        assert len(lines) <= 15
        assert max(map(len, lines)) <= 120
        compile("\n".join(lines), kind, "exec")


@pytest.mark.extras
def test_a_resumed_run_replaces_its_export_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "kd").mkdir()
    (tmp_path / "kd" / "README.md").touch()
    (tmp_path / "kd" / ".unfinished-killed").mkdir()

    def check(resume: bool) -> None:
        config = Namespace(export=str(tmp_path), overwrite=False, resume=resume)
        students.check_students(SimpleNamespace(config=config), ["kd"])  # type: ignore[arg-type]

    with pytest.raises(BadInput, match=r"a new folder; this one holds README\.md"):
        check(resume=True)  # without net.yaml it is somebody else's
    (tmp_path / "kd" / "net.yaml").touch()
    check(resume=True)
    with pytest.raises(BadInput, match=r"or `overwrite true`; this one holds README\.md"):
        check(resume=False)
    (tmp_path / "kd" / "mine.txt").touch()
    with pytest.raises(BadInput, match=r"a new folder; this one holds mine\.txt"):
        check(resume=True)


@pytest.mark.extras
def test_an_export_that_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_net(net(LightNN), spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), tmp_path / "net", facts())
    for slow in (ONNX, PROGRAM):
        monkeypatch.setitem(writers.WRITERS, slow, lambda *_: 1 / 0)
    exporting.read_here(monkeypatch)
    out, contents = tmp_path / "exported", []
    for _ in range(3):
        assert sorted(export_net(tmp_path / "net", out)) == ["model.onnx", "model.pt2"]
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1] == contents[2]  # metadata have an order
    assert set(contents[0]) == {*FILES} - {"model.onnx", "model.pt2"}
    save_net(net(LightNN, 1), spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), tmp_path / "net", facts())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exports, "read_back", interrupted)
    for place in (out, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            export_net(tmp_path / "net", place)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == contents[0]
    assert not [*(tmp_path / "new").iterdir()]


@pytest.mark.extras
def test_what_can_not_be_exported_is_one_line(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").touch()
    given = ["--run", tmp_path]
    for flags, line in [
        (["--out", "null"], "--out null: expected a folder, as exported"),
        (["--out", "/proc/new"], "--out /proc/new: expected a folder that can be written"),
        (["--out", tmp_path / "file"], f"--out {tmp_path / 'file'}: expected a folder that can be written"),
        (["--checkpoint_every", "9"], "--checkpoint_every 9: not allowed, as nothing is trained"),
    ]:
        assert refusal(export.main, *given, *flags) == line


@pytest.mark.extras("onnxruntime")
def test_use_py_answers_for_deep_images_and_where_the_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, seen = metadata(facts(commit=None)), list[np.ndarray]()

    def run(_: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        seen.append(inputs["images"])
        return [np.eye(10)[3:4]]

    meta = SimpleNamespace(custom_metadata_map=known)
    session = SimpleNamespace(get_modelmeta=lambda: meta, run=run)
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda _: session)
    deep = np.tile(np.array([[0, 256, 30000, 65535]], np.uint16), (8, 2))
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(np.float32(deep / 65535)).save(tmp_path / "float.tiff")
    names = [str(tmp_path / name) for name in ("deep.png", "float.tiff")]
    monkeypatch.setattr(sys, "argv", ["use.py", *names])
    exec((TEMPLATES / "images.py.txt").read_text(), {"__file__": str(tmp_path / "use.py")})
    for images in seen:
        np.testing.assert_array_equal(np.rint((images * 0.4 + 0.3) * 255)[0, 0, 0, :4], [0, 1, 117, 255])
    assert [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()] == ["3", "3"]


def test_what_can_not_leave_is_one_line(tmp_path: Path, refusal: Refusal) -> None:
    plain = spec("lit_modules.nets.LightNN", {"input_shape": SHAPE})
    save_net(net(LightNN), plain, tmp_path / "seed0" / "kd", facts())
    save_net(net(LightNN), plain, tmp_path / "old")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").touch()
    ours = tmp_path / "ours"
    ours.mkdir()
    for name in ("README.md", "net.yaml"):
        (ours / name).touch()
    new = tmp_path / "new"
    known = ["--run", tmp_path / "seed0" / "kd"]
    for flags, says in (
        (["--run", tmp_path, "--out", new], f"there: {tmp_path}/old, {ours}, {tmp_path}/seed0/kd"),
        (["--out", new], "--run (nothing): expected a net's folder"),
        (["--run", tmp_path / "old", "--out", new], "train it again"),
        ([*known, "--out", tmp_path / "taken", "--overwrite", "true"], "a new folder; this one holds mine.txt"),
        ([*known, "--out", ours], "a new folder; or --overwrite true; this one holds README.md"),
        ([*known, "--out", new, "--resume", "true"], "--overwrite true writes the folder again"),
    ):
        assert says in refusal(export.main, *flags)
    line = refusal(kd.main, "--only", "ce", "--export", tmp_path / "taken" / "mine.txt", "--out", tmp_path / "run")
    assert line.startswith(f"--export {tmp_path}/taken/mine.txt/ce: expected a folder that can be written")
    assert not new.exists()
