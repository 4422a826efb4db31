"""The fingerprint of a data set: the same in a copy, another after any change of a sample that is used."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset, random_split

from apprentice.keyed import fold_in, with_seed
from datamodules import Digits, ImageFolder, InMemoryData, LabelledText, Text, fingerprints
from datamodules.adapter import DataModuleAdapter
from datamodules.fingerprints import Fingerprint, changed_parts, touched_parts
from datamodules.splits import Split
from tests.datamodules.test_adapter import Mine, Plain
from tests.datamodules.test_hugging_face import made  # noqa: F401 - a fixture
from tests.datamodules.test_image_folder import picture

PARTS = ["train", "validation", "test"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files without compression: a changed one has the old size."""
    for part, label, count in (("train", "cat", 7), ("train", "dog", 5), ("test", "cat", 3), ("test", "dog", 3)):
        for number in range(count):
            picture(tmp_path / "set" / part / label / f"{number}.bmp", number)
    return tmp_path / "set"


def of_folder(root: Path, **options: Any) -> Fingerprint:
    return ImageFolder(root, **{"validation_size": 0, **options}).fingerprint()


def replaced(path: Path) -> None:
    before = path.stat()
    picture(path, 99)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "added": (lambda root: picture(root / "train/cat/7.bmp", 7), ["train"]),
    "removed": (lambda root: (root / "test/dog/2.bmp").unlink(), ["test"]),
    "replaced": (lambda root: replaced(root / "train/cat/0.bmp"), ["train"]),
    "renamed": (lambda root: (root / "train/cat/6.bmp").rename(root / "train/cat/7.bmp"), ["train"]),
    "of another class": (lambda root: (root / "train/cat/6.bmp").rename(root / "train/dog/6.bmp"), ["train"]),
}


@pytest.mark.parametrize("large", [False, True])
def test_a_copied_folder_is_the_same(root: Path, large: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if large:
        monkeypatch.setattr(fingerprints, "READ", 10)
    before = of_folder(root)
    copied = shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)  # with other times
    for options in ({}, {"cache": "none"}, {"num_workers": 0}):
        again = of_folder(copied, **options)
        assert changed_parts(before, again) == []
        assert touched_parts(before, again) == (["train", "test"] if large else [])
    assert touched_parts(before, of_folder(root)) == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("large", [False, True])
def test_a_changed_folder_is_another(root: Path, change: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(fingerprints, "READ", 10)
    before, (act, parts) = of_folder(root), CHANGES[change]
    act(root)
    assert changed_parts(before, of_folder(root)) == parts


def test_of_a_large_folder_few_files_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "READ", 10)
    monkeypatch.setattr(fingerprints, "SAMPLED", 4)
    read, content = [], ImageFolder(root)
    content.setup()
    kind = type(content._encoded[0])
    whole = kind.content
    monkeypatch.setattr(kind, "content", lambda self, place: read.append(self.name(place)) or whole(self, place))
    before = of_folder(root)
    assert len(read) == 8  # of two sets with samples
    replaced(root / "train/dog/4.bmp")  # is not read
    assert changed_parts(before, of_folder(root)) == []
    replaced(root / "train/cat/0.bmp")
    assert changed_parts(before, of_folder(root)) == ["train"]


def test_what_a_run_does_not_use_may_change(root: Path) -> None:
    data = ImageFolder(root, validation_size=0, train_size=4)
    before = data.fingerprint()
    used = [Path(data._encoded[0].name(place)) for place in range(4)]
    replaced(next(path for path in sorted(root.glob("train/*/*")) if path not in used))
    assert changed_parts(before, of_folder(root, train_size=4)) == []
    replaced(used[0])
    assert changed_parts(before, of_folder(root, train_size=4)) == ["train"]


def test_samples_in_memory_count_to_the_bit() -> None:
    class Own(InMemoryData):
        input_shape, class_names, flipped = (4,), ("a", "b"), 0

        def read(self) -> Any:
            inputs = torch.arange(160, dtype=torch.uint8).view(40, 4)
            inputs[self.flipped, 0] ^= 1
            pair = Split(inputs, torch.arange(40) % 2)
            return pair, pair

    class Changed(Own):
        flipped = 3

    before = Own(validation_size=0).fingerprint()
    assert changed_parts(before, Own(validation_size=0).fingerprint()) == []
    assert changed_parts(before, Changed(validation_size=0).fingerprint()) == ["train", "test"]
    assert [*Digits().fingerprint()] == PARTS
    assert changed_parts(Digits().fingerprint(), Digits(augment=True, batch_size=7).fingerprint()) == []
    assert changed_parts(Digits().fingerprint(), Digits(seed=1).fingerprint()) == ["train", "validation"]


@pytest.mark.parametrize("kind", [Text, LabelledText])
def test_texts_are_known_again(kind: Any, tmp_path: Path) -> None:
    path, again = tmp_path / "text", tmp_path / "again"
    path.write_text("".join(f"{'ab'[number % 2]}\tline {number}\n" for number in range(80)))
    shutil.copyfile(path, again)
    before = kind(path).fingerprint()
    assert changed_parts(before, kind(again).fingerprint()) == []
    if kind is Text:
        assert changed_parts(before, Text(path, block_size=8).fingerprint()) == []  # the same held-out tokens
    path.write_text(path.read_text().replace("line 4\n", "line 5\n"))
    assert changed_parts(before, kind(path).fingerprint()) == ["train"]


class Tensors(LightningDataModule):
    """Another's, with tensors of which one may be changed, and a split that draws from the global generator."""

    num_classes = 2

    def __init__(self, changed: float = 0.0, labels: int = 0, count: int = 60, noise: bool = False) -> None:
        super().__init__()
        inputs = torch.linspace(0, 1, count)[:, None].repeat(1, 5)
        inputs[30] += changed
        self.whole = TensorDataset(inputs, (torch.arange(count) + labels) % 2)
        self.noise, self.drawn = noise, torch.Generator()
        self.drawn.seed()

    def setup(self, stage: str) -> None:
        self.train, self.test = random_split(self.whole, [0.6, 0.4])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=8, shuffle=True, collate_fn=self._noisy if self.noise else None)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, batch_size=8)

    def _noisy(self, samples: Any) -> Any:
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs + torch.rand(inputs.shape, generator=self.drawn), labels


def of(data: LightningDataModule) -> Fingerprint:
    adapted = DataModuleAdapter(data)
    return with_seed(fold_in(id(data)), adapted.fingerprint)  # whatever the global generators are


def test_anothers_data_module_is_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datamodules.adapter.READ", 60)
    before = of(Tensors())
    assert changed_parts(before, of(Tensors())) == []
    assert changed_parts(before, of(Tensors(changed=1e-9))) == []  # another processor's rounding
    assert len(changed_parts(before, of(Tensors(changed=0.1)))) == 1
    assert changed_parts(before, of(Tensors(labels=1))) == ["train", "test"]
    assert changed_parts(before, of(Tensors(count=61))) == ["train", "test"]
    noisy = of(Tensors(noise=True))
    assert noisy["train"]["means"] is None
    assert changed_parts(noisy, of(Tensors(noise=True))) == []
    for kind in (Mine, Plain):
        assert [*of(kind())] == PARTS
        assert changed_parts(of(kind()), of(kind())) == []


def test_anothers_data_module_may_say_it_itself() -> None:
    class Versioned(Tensors):
        def fingerprint(self) -> str:
            return "version 3"

    assert of(Versioned()) == {"all": "version 3"}


@pytest.mark.extras("datasets")
@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_hugging_faces_rows_are_known_again(kind: str, made: Any) -> None:  # noqa: F811 - the fixture
    from datamodules import HuggingFaceImages

    folder = made(kind)
    before = HuggingFaceImages(str(folder)).fingerprint()
    assert [*before] == PARTS
    shutil.rmtree(folder)
    assert changed_parts(before, HuggingFaceImages(str(made(kind)), cache="none").fingerprint()) == []
    shutil.rmtree(folder)
    other = made(kind, {"train": 40, "validation": 6, "test": 7})
    assert changed_parts(before, HuggingFaceImages(str(other)).fingerprint()) == ["test"]
