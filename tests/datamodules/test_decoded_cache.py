"""Images decoded on disk: written once, whoever wants them, and right whatever happens to the file."""

import multiprocessing
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import datamodules.decoded_cache
from apprentice.errors import BadInput
from datamodules import ImageFolder
from datamodules.image_sources import ImageFiles
from tests import waiting
from tests.datamodules.test_image_folder import picture
from tests.training import assert_same

SIZE = 4 * 30 + 30 * 3 * 10 * 12  # bytes of the cache of 30 images to train


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part, label, count in (("train", "cat", 16), ("train", "dog", 14), ("test", "cat", 4), ("test", "dog", 4)):
        for i in range(count):
            picture(tmp_path / "images" / part / label / f"{i}.png", i)
    return tmp_path / "images"


def contents(root: Path, **options: Any) -> dict[str, torch.Tensor]:
    data = ImageFolder(root, **{"cache": "disk", "num_workers": 0, **options})
    return {part: data.split(part).take(torch.arange(size)).inputs for part, size in data.sizes.items()}


def in_memory(root: Path, **options: Any) -> dict[str, torch.Tensor]:
    return contents(root, cache="memory", **options)


def cache(root: Path) -> Path:
    return max((root / ".apprentice").iterdir(), key=lambda path: path.stat().st_size)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found, take = [], ImageFiles.take

    def taken(self: ImageFiles, chosen: torch.Tensor) -> Any:
        found.extend(Path(self.name(place)).relative_to(self.root) for place in chosen.tolist())
        return take(self, chosen)

    monkeypatch.setattr(ImageFiles, "take", taken)
    return found


def test_each_image_is_decoded_once_by_all_runs(root: Path, decoded: list[Path]) -> None:
    first = contents(root, train_size=10, test_size=4, validation_size=0)
    assert len(set(decoded)) == len(decoded) == 14
    whole = contents(root)
    assert len(set(decoded)) == len(decoded) == 38
    contents(root, seed=5)
    assert len(decoded) == 38
    assert cache(root).stat().st_size == SIZE
    assert_same(whole, in_memory(root))
    assert_same(first, in_memory(root, train_size=10, test_size=4, validation_size=0))


@pytest.mark.parametrize("change", ["content", "name", "size"])
def test_other_images_are_not_taken_for_those_in_the_cache(root: Path, decoded: list[Path], change: str) -> None:
    contents(root)
    if change == "content":
        picture(root / "train" / "cat" / "0.png", 99)
    elif change == "name":
        (root / "train" / "cat" / "3.png").rename(root / "train" / "cat" / "30.png")
    decoded.clear()
    options = {"image_size": 6} if change == "size" else {}
    found = contents(root, **options)
    assert len(decoded) == (38 if change == "size" else 30)
    assert_same(found, in_memory(root, **options))


@pytest.mark.parametrize("damage", ["pixels", "sums", "cut", "emptied", "deleted"])
@pytest.mark.parametrize("when", ["before a run", "in a run"])
def test_what_is_damaged_is_decoded_anew(root: Path, decoded: list[Path], damage: str, when: str) -> None:
    data = ImageFolder(root, cache="disk", num_workers=0, validation_size=0)
    data.setup()
    expected, file = in_memory(root, validation_size=0)["train"], cache(root)
    decoded.clear()
    content = bytearray(file.read_bytes())
    if damage in {"pixels", "sums"}:
        content[200 if damage == "pixels" else 5] ^= 1
        file.write_bytes(content)
    elif damage == "deleted":
        shutil.rmtree(file.parent)
    else:
        file.write_bytes(content[: SIZE - 500 if damage == "cut" else 0])
    if when == "before a run":
        data = ImageFolder(root, cache="disk", num_workers=0, validation_size=0)
    assert torch.equal(data.split("train").take(torch.arange(30)).inputs, expected)
    again = len(decoded)
    assert again >= (when == "before a run" or damage != "sums")
    assert damage in {"emptied", "deleted"} or again <= 2
    assert torch.equal(data.split("train").take(torch.arange(30)).inputs, expected)
    assert len(decoded) == again


def test_what_is_decoded_before_a_fault_stays(root: Path, decoded: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datamodules.decoded_cache, "CHUNK", 4)
    path = root / "train" / "dog" / "5.png"
    whole, found = path.read_bytes(), path.stat()
    path.write_bytes(b"x" * len(whole))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(BadInput, match="an image that can be read"):
        contents(root, validation_size=0)
    kept = len(decoded) - 4
    path.write_bytes(whole)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    decoded.clear()
    assert_same(contents(root, validation_size=0), in_memory(root, validation_size=0))
    assert kept > 0
    assert sum(path.parts[0] == "train" for path in decoded) == 30 + 30 - kept  # once more into memory


@pytest.mark.parametrize("fault", ["no room", "no room for a file", "no folder"])
def test_a_full_disk_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[Path], fault: str) -> None:
    folder = root / ".apprentice"
    if fault == "no room":
        usage = SimpleNamespace(free=5000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        expected = "a folder on a disk with room for 0.00 GB of images; 0.00 GB are free"
    elif fault == "no folder":
        folder.write_text("a file")
        expected = "a folder that can be written, on a disk with room for the images; File exists"
    else:
        expected = "a folder that can be written, on a disk with room for the images; File too large"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if fault == "no room for a file":
            resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limit[1]))
        with pytest.raises(BadInput) as error:
            contents(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(error.value) == f"data.cache_dir {folder}: expected {expected}"
    monkeypatch.undo()
    if fault == "no room for a file":
        kept = len(decoded)
        assert_same(contents(root), in_memory(root))
        assert 0 < kept < 38
    elif fault == "no room":
        assert not decoded
        assert_same(contents(root), in_memory(root))


def test_processes_that_fill_it_at_once_share_the_work(root: Path, tmp_path: Path) -> None:
    fork, barrier = multiprocessing.get_context("fork"), multiprocessing.get_context("fork").Barrier(3)

    def run(rank: int) -> None:
        barrier.wait(waiting.LIMIT)
        torch.save(contents(root), tmp_path / f"{rank}.pt")

    processes = [fork.Process(target=run, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    waiting.wait(lambda: all(p.exitcode is not None for p in processes), lambda: [p.pid for p in processes if p.pid])
    assert [process.exitcode for process in processes] == [0, 0, 0]
    for rank in range(3):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), in_memory(root))


def test_elsewhere_on_request(root: Path, tmp_path: Path) -> None:
    contents(root, cache_dir=tmp_path / "elsewhere")
    assert not (root / ".apprentice").exists()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2
