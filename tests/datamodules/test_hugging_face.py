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
from tests.commands import results
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
        features = datasets.Features(
            {"picture": datasets.Image(), "kind": label or datasets.ClassLabel(names=["a", "b"])}
        )
        splits = {}
        for part, count in counts.items():
            found = {"picture": [Image.fromarray(image) for image in pixels(part, count)]}
            found["kind"] = columns.get(part, [i % 2 for i in range(count)])
            splits[part] = datasets.Dataset.from_dict(found, features=features)
        folder = tmp_path / kind
        if kind == "saved":
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


def test_a_stream_and_a_cache_train_to_the_bits_of_memory(made: Any) -> None:
    path, options = str(made()), {"augment": True, "image_size": 8, "batch_size": 7}
    expected = ended(HuggingFaceImages(path, cache="memory", **options))
    for more in ({"cache": "none", "num_workers": 0}, {"cache": "none", "num_workers": 2}, {"cache": "disk"}):
        assert_same(ended(HuggingFaceImages(path, **more, **options)), expected)  # type: ignore[arg-type]
    assert list((Path(path) / ".apprentice").iterdir())


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


def test_faults_are_one_line(made: Any, tmp_path: Path) -> None:
    path = str(made(counts={"train": 6}))
    cases = {
        "nobody/nothing": ({}, "--data.path nobody/nothing: expected a data set of images, by name or folder; "),
        path: ({"label": "name"}, "--data.label name: expected a column of the data set, one of picture, kind"),
        f"{path}/": ({"image": "kind"}, "--data.image kind: expected a column of images; it is of ClassLabel"),
        f"{path}/.": ({}, f"--data.path {path}/.: expected a split test with labels; it is not there"),
    }
    for where, (options, message) in cases.items():
        with pytest.raises(BadInput) as error:
            HuggingFaceImages(where, **options).setup()  # type: ignore[arg-type]
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)


def test_the_study_takes_it(made: Any, tmp_path: Path) -> None:
    flags = ["--data", "HuggingFaceImages", "--data.path", str(made()), "--data.image_size", "8"]
    size = ["--teacher", "LightNN", "--only", "ce", "--seeds", "1", "--trainer.max_epochs", "1"]
    kd.main([*flags, *size, "--out", str(tmp_path / "run")])
    assert results(tmp_path / "run")["data"] == {"name": "HuggingFaceImages", **COUNTS}
