"""Data sets of the Hugging Face hub's kind, made here: pixels, labels, splits, and each fault in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from apprentice.errors import BadInput
from datamodules import HuggingFaceImages
from experiments import kd
from tests.commands import bad_input, results
from tests.datamodules.test_streams import ended
from tests.training import assert_same

pytestmark = pytest.mark.extras("datasets")
COUNTS = {"train": 40, "validation": 6, "test": 8}


def pixels(part: str, count: int) -> np.ndarray:
    return np.random.default_rng(len(part)).integers(0, 256, (count, 10, 12, 3), dtype=np.uint8)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a folder, of `save_to_disk` or of parquet files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()

    def make(kind: str = "saved", counts: dict[str, int] = COUNTS, label: Any = None, **columns: Any) -> Path:
        """`kind` is its name; `label` the labels' type, or that of each split; `columns` are labels by split."""
        usual, splits = datasets.ClassLabel(names=["a", "b"]), {}
        for part, count in counts.items():
            own = label.get(part, usual) if isinstance(label, dict) else label or usual
            features = datasets.Features({"picture": datasets.Image(), "kind": own})
            found: Any = {"picture": [Image.fromarray(image) for image in pixels(part, count)]}
            for place in columns.get("lost", ()):
                found["picture"][place] = None
            found["kind"] = columns.get(part, [i % 2 for i in range(count)])
            splits[part] = datasets.Dataset.from_dict(found, features=features)
        folder = tmp_path / kind
        if kind.startswith("saved"):
            datasets.DatasetDict(splits).save_to_disk(folder)
        else:
            folder.mkdir()
            for part, split in splits.items():
                split.to_parquet(folder / f"{part}.parquet")
        return folder

    return make


def test_pixels_and_labels_are_those_of_the_splits(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("saved", "parquet"):
        data = HuggingFaceImages(str(made(kind)))
        assert data.sizes == COUNTS
        assert (data.input_shape, data.class_names) == ((3, 10, 12), ("a", "b"))
        for part, count in COUNTS.items():
            inputs, labels = data.split(part)
            assert np.array_equal(inputs.permute(0, 2, 3, 1).numpy(), pixels(part, count))
            assert labels.tolist() == [i % 2 for i in range(count)]
    assert capsys.readouterr().err == ""


def test_a_stream_trains_to_the_bits_of_memory(made: Any) -> None:
    path, options = str(made()), {"augment": True, "image_size": 8, "batch_size": 7}
    expected = ended(HuggingFaceImages(path, cache="memory", **options))
    for workers in (0, 2):
        assert_same(ended(HuggingFaceImages(path, cache="none", num_workers=workers, **options)), expected)


def test_splits_and_labels_of_other_kinds(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import datasets

    hidden = made(counts={"train": 20, "valid": 6, "test": 4}, test=[-1] * 4)
    data = HuggingFaceImages(str(hidden), validation_size=4)
    assert data.sizes == {"train": 16, "validation": 4, "test": 6}
    told = "HuggingFaceImages: the split test has no labels: tests on valid, validates on images held out from train\n"
    assert capsys.readouterr().err == told
    words = made("parquet", {"train": 6, "test": 2}, datasets.Value("string"), train=[*"cabcab"], test=[*"cb"])
    data = HuggingFaceImages(str(words), label="kind", validation_size=0)
    assert data.split("train").labels.tolist() == [2, 0, 1, 2, 0, 1]
    assert data.split("test").labels.tolist() == [2, 1]
    assert data.class_names == ("a", "b", "c")
    lacking = {"counts": {"train": 6, "val": 2, "test": 2}, "val": [0, -1]}
    with pytest.raises(BadInput, match="a label of the training set's classes for all of val"):
        HuggingFaceImages(str(made("third", **lacking))).setup()
    assert torch.equal(data.split("train").inputs[0].movedim(0, -1), torch.from_numpy(pixels("train", 6)[0]))


SMALL = {"train": 6, "validation": 2, "test": 3}


@pytest.mark.parametrize("part", ["test", "validation"])
def test_classes_of_splits_are_matched_by_name(made: Any, part: str) -> None:
    """Another order, a class that the split lacks, and names in place of numbers: the labels are the same."""
    import datasets

    words = ["dog", "cat", "dog"][: SMALL[part]]
    for number, names in enumerate((["dog", "cat"], ["cat", "dog"], ["bird", "dog", "cat"])):
        labels = {part: datasets.ClassLabel(names=names), "train": datasets.ClassLabel(names=["bird", "cat", "dog"])}
        labels = dict.fromkeys(SMALL, labels["train"]) | labels
        columns = {"train": [0, 1, 2] * 2, part: [names.index(word) for word in words]}
        data = HuggingFaceImages(str(made(f"saved{number}", SMALL, labels, **columns)))
        assert data.split(part).labels.tolist() == [2, 1, 2][: SMALL[part]]
        assert data.class_names == ("bird", "cat", "dog")
    labels[part] = datasets.Value("string")
    data = HuggingFaceImages(str(made("saved words", SMALL, labels, **columns | {part: words})))
    assert data.split(part).labels[0] == 2
    labels = dict.fromkeys(SMALL, datasets.Value("string")) | {part: datasets.ClassLabel(names=["c", "b"])}
    columns = {split: ["a"] * count for split, count in SMALL.items()}
    columns |= {"train": [*"bacbac"], part: [0, 1, 0][: SMALL[part]]}
    data = HuggingFaceImages(str(made("saved mixed", SMALL, labels, **columns)), label="kind")
    assert data.split(part).labels.tolist() == [2, 1, 2][: SMALL[part]]


def test_parquet_files_with_classes_of_their_own_are_refused(made: Any) -> None:
    """The library reads all of them with the names of the first."""
    import datasets

    labels = {"train": datasets.ClassLabel(names=["cat", "dog"]), "test": datasets.ClassLabel(names=["dog", "cat"])}
    path = made("files", {"train": 4, "test": 2}, labels)
    expected = f"data.path {path / 'test.parquet'}: expected the classes cat, dog in this order, as in train"
    with pytest.raises(BadInput, match=f"^{expected}") as error:
        HuggingFaceImages(str(path)).setup()
    assert "\n" not in str(error.value)


def test_a_class_that_train_lacks_and_labels_that_are_no_classes_are_refused(made: Any) -> None:
    import datasets

    def refuse(kind: str, label: Any, **columns: Any) -> str:
        counts = {"train": 4, "test": 2}
        if not isinstance(label, dict) and label is not None:
            columns = {split: [columns["value"]] * count for split, count in counts.items()}
        line = bad_input(lambda: HuggingFaceImages(str(made(kind, counts, label, **columns)), label="kind").setup())
        return line.partition(": expected ")[2]

    class_lists = {"train": datasets.ClassLabel(names=["a", "b"]), "test": datasets.ClassLabel(names=["a", "b", "c"])}
    expected = "a label of the training set's classes for all of"
    assert refuse("saved more", class_lists, test=[0, 2]) == f"{expected} test; test[1] has c"
    numbers = class_lists | {"test": datasets.Value("int64")}
    assert refuse("saved numbers", numbers, test=[0, 1]) == f"{expected} test; test[0] has 0"
    assert refuse("saved some", None, test=[0, None]) == f"{expected} test; test[1] has no label"
    assert refuse("saved none", None, train=[0, 1, None, 1]) == f"{expected} train; train[2] has no label"
    kinds = {
        "float64": (datasets.Value("float64"), 0.5),
        "List": (datasets.List(datasets.Value("int64")), [1, 0]),
        "dict": ({"boxes": datasets.List(datasets.Value("float32"))}, {"boxes": [1.0]}),
        "Image": (datasets.Image(), Image.new("L", (12, 10))),
    }
    for kind, (feature, value) in kinds.items():
        label = {"train": feature, "test": feature} if kind == "dict" else feature
        columns = {"train": [value] * 4, "test": [value] * 2} if kind == "dict" else {"value": value}
        told = "a column with one class of each image, as ClassLabel, whole numbers or texts; in train it is of"
        assert refuse(f"saved {kind}", label, **columns) == f"{told} {kind}"


def test_a_picture_that_is_none_is_named_or_skipped(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(made("saved", {"train": 7, "test": 4}, lost=[0, 3]))
    with pytest.raises(BadInput, match=r"^data\.path train\[0\]: expected an image; there is none$"):
        HuggingFaceImages(path, cache="none").setup()
    data = HuggingFaceImages(path, on_error="skip", validation_size=0, num_workers=0)
    assert data.sizes == {"train": 5, "validation": 0, "test": 2}
    assert data.input_shape == (3, 10, 12)
    assert capsys.readouterr().err.splitlines()[0].endswith(": 4 damaged")


def test_faults_are_one_line(made: Any, tmp_path: Path) -> None:
    path = str(made(counts={"train": 6}))
    cases = {
        "nobody/nothing": ({}, "data.path nobody/nothing: expected a data set of images, by name or folder; "),
        path: ({"label": "name"}, "data.label name: expected a column of the data set, one of picture, kind"),
        f"{path}/": ({"image": "kind"}, "data.image kind: expected a column of images; it is of ClassLabel"),
    }
    for where, (options, message) in cases.items():
        assert bad_input(HuggingFaceImages(where, **options).setup).startswith(message)


def test_the_study_takes_it(made: Any, tmp_path: Path) -> None:
    flags = ["--data", "HuggingFaceImages", "--data.path", str(made()), "--data.image_size", "8"]
    size = ["--teacher", "LightNN", "--only", "ce", "--seeds", "1", "--trainer.max_epochs", "1"]
    kd.main([*flags, *size, "--out", str(tmp_path / "run")])
    assert results(tmp_path / "run")["data"] == {"name": "HuggingFaceImages", **COUNTS}
