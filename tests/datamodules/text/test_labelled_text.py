"""Labelled lines of text: read as they stand, split by a rule, and trained on like images."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim import Adam

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import LabelledText, Shakespeare
from experiments import kd
from harness import cli
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import RNNClassifier
from lit_modules.objectives import Cosine, CrossEntropy, Hinton
from tests.commands import bad_input
from tests.training import LinesLogger, assert_same, fit, weights

LINES = [f"{name}\t{name} says {n:02}" for n in range(20) for name in ("ada", "bob")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.tsv"
    path.write_text("\n".join([*LINES, ""]))
    return path


def texts(data: LabelledText, part: str) -> list[str]:
    return [bytes(row).rstrip(b"\0").decode() for row in data.split(part).inputs.tolist()]


def test_every_tenth_line_of_a_class_tests(file: Path) -> None:
    data = LabelledText(file, length=11, validation_size=0)
    assert texts(data, "test") == ["ada says 09", "bob says 09", "ada says 19", "bob says 19"]
    assert data.split("test").labels.tolist() == [0, 1, 0, 1]
    assert (data.class_names, data.input_shape, data.num_classes) == (("ada", "bob"), (11,), 2)
    assert sorted([*texts(data, "train"), *texts(data, "test")]) == sorted(line.partition("\t")[2] for line in LINES)
    subset = LabelledText(file, length=11, train_size=8, validation_size=4)
    assert subset.sizes == {"train": 8, "validation": 4, "test": 4}
    assert subset.split("train").labels.bincount().tolist() == [4, 4]


def test_a_folder_has_a_file_for_each_label(file: Path, tmp_path: Path) -> None:
    for name in ("ada", "bob"):
        told = [line.partition("\t")[2] for line in LINES if line.startswith(name)]
        (tmp_path / f"{name}.txt").write_text("\n".join(told))
    one, other = LabelledText(file, validation_size=0), LabelledText(tmp_path, validation_size=0)
    assert sorted(texts(one, "train")) == sorted(texts(other, "train"))
    assert one.class_names == other.class_names


def test_an_unequal_text_keeps_its_rare_class(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("".join(f"{name}\tsays {n}\n" for name, count in (("ada", 200), ("bob", 20)) for n in range(count)))
    data = LabelledText(file)
    assert data.split("train").labels.bincount().tolist() == [162, 16]
    assert data.split("validation").labels.bincount().tolist() == [18, 2]
    assert capsys.readouterr().err == "LabelledText: training samples of a class: ada 162, bob 16\n"


def test_lines_are_cut_off_or_filled_up(file: Path) -> None:
    file.write_text("".join(f"{name}\tgr\u00fcn\n" for name in "ab" for _ in range(10)))
    assert LabelledText(file, length=7).split("test").inputs[0].tolist() == [103, 114, 195, 188, 110, 0, 0]
    short = LabelledText(file, length=2)
    assert short.split("test").inputs[0].tolist() == [103, 114]
    batch = next(iter(short.test_dataloader()))
    assert batch.inputs.dtype == torch.uint8
    assert short.on_after_batch_transfer(batch, 0).inputs.dtype == torch.int64


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "a file of lines `label<TAB>text`, or a folder"),
        ("", "lines of at least 2 classes; there are 0"),
        ("a\tone\ntwo\n", "lines `label<TAB>text`; line 2 is another"),
        ("a\tone\n" * 10 + "b\ttwo\n" * 9, "at least 10 lines of each class; b has 9"),
    ],
)
def test_what_is_no_labelled_text_is_refused(content: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    if content is not None:
        path.write_text(content)
    assert bad_input(lambda: LabelledText(path).setup()).startswith(f"data.root {path}: expected {expected}")
    with pytest.raises(BadInput, match=r"^data\.length 0: expected at least 1"):
        LabelledText(path, length=0)


PLAY = "Ada:\n{}\nBob:\n{}\nCarl:\nAlone: I said.\n".format("One.\n" * 30, "Two.\n" * 20)


def test_speakers_of_plays(tmp_path: Path) -> None:
    file = tmp_path / "tinyshakespeare" / "input.txt"
    with pytest.raises(BadInput, match=rf"^data.root {tmp_path}: expected tiny Shakespeare; {file} is not there"):
        Shakespeare(tmp_path).setup()
    file.parent.mkdir()
    file.write_text(PLAY)
    for root in (tmp_path, file):
        data = Shakespeare(root, speakers=2)
        assert data.split("test").labels.bincount().tolist() == [3, 2]
        assert data.class_names == ("Ada", "Bob")
    for speakers in (1, 3):
        with pytest.raises(BadInput, match=rf"^data.speakers {speakers}: expected 2 to 2, the speakers of at least"):
            Shakespeare(tmp_path, speakers=speakers).setup()


def shakespeare(root: Path) -> Shakespeare:
    data = Shakespeare(root, speakers=4, length=24, batch_size=37, train_size=101, test_size=100, validation_size=0)
    data.setup()
    return data


def rnn(seed: int = 0, hidden: int = 16) -> RNNClassifier:
    return with_seed(seed, lambda: RNNClassifier(8, hidden, dropout=0.1, num_classes=4))


@pytest.mark.real_data
def test_the_most_frequent_speakers(data_root: Path) -> None:
    data = Shakespeare(data_root, speakers=4, validation_size=0)
    data.setup()
    assert data.class_names == ("DUKE VINCENTIO", "GLOUCESTER", "KING RICHARD II", "LEONTES")
    lines = data.split("train").labels.bincount() + data.split("test").labels.bincount()
    assert lines.tolist() == [822, 902, 758, 679]
    assert sorted(shakespeare(data_root).split("train").labels.bincount().tolist()) == [25, 25, 25, 26]


@pytest.mark.real_data
def test_text_is_classified_alike_on_one_and_two_processes(data_root: Path, tmp_path: Path) -> None:
    found = []
    for devices in (1, 2):
        logger = LinesLogger(tmp_path / f"{devices}.jsonl")
        options = {"max_epochs": 4, "log_every_n_steps": 1, "precision": "64-true", "logger": logger}
        module = fit(LitClassifier(rnn(), 4, partial(Adam, lr=0.01)), shakespeare(data_root), devices, **options)
        found.append((logger.values("train/loss"), weights(module)))
    (one, ended), (two, other) = found
    assert len(one) == 12
    assert sum(one[-3:]) < sum(one[:3])
    assert one == pytest.approx(two, abs=1e-9, rel=0)
    assert_same(ended, other, atol=1e-9)


@pytest.mark.real_data
def test_text_classifiers_are_distilled(data_root: Path) -> None:
    students = {"ce": (rnn(), CrossEntropy()), "kd": (rnn(), Hinton()), "cosine": (rnn(), Cosine())}
    module = Distillation(rnn(1, hidden=24), students, input_shape=(24,), num_classes=4)
    before = weights(module)
    fit(module, shakespeare(data_root), max_epochs=1)
    assert not module.failed
    moved = {key.split(".")[1] for key, value in weights(module).items() if not torch.equal(value, before[key])}
    assert moved >= set(students)


def test_the_bake_off_takes_text_and_tells_nets_of_images_apart() -> None:
    line = "--data Shakespeare --data.root X --teacher RNNClassifier --teacher.hidden 32 --student.dropout 0.2"
    config = kd.parser().parse(line.split())
    assert cli.build(config.data, "data").speakers == 8
    built = cli.build(config.teacher, "teacher", input_shape=(64,), num_classes=8)
    assert built(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 8)
    with pytest.raises(BadInput, match=r"^teacher RNNClassifier: .*input_shape \(1, 8, 8\): expected \(T,\), texts"):
        cli.build(config.teacher, "teacher", input_shape=(1, 8, 8))
    for name in ("LightNN", "ResNet", "Torchvision"):
        choice = kd.parser().parse(["--student", name]).student
        with pytest.raises(BadInput, match=rf"^student {name}: .*input_shape \(64,\): expected \(C, H, W\), images"):
            cli.build(choice, "student", input_shape=(64,), num_classes=8)
