"""The real sets: all of MNIST, and CIFAR-10 as a folder of JPEG files."""

import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks import photo_folder
from datamodules import CIFAR10, MNIST, ImageFolder

pytestmark = pytest.mark.real_data
EACH = {"train": 60, "test": 20}  # images of a class


@pytest.fixture(scope="module")
def photographs(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first images of each class of CIFAR-10, as train/<class>/* and test/<class>/*."""
    folder = tmp_path_factory.mktemp("cifar")

    def wanted(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        parts = Path(member.name).parts
        few = member.isfile() and int(Path(member.name).stem) < EACH[parts[1]]
        return tarfile.data_filter(member, path) if few else None

    with tarfile.open(data_root / "cifar10-jpg.tar.xz") as archive:
        archive.extractall(folder, filter=wanted)
    return folder / "cifar10"


def test_mnist_is_complete_and_normal(data_root: Path) -> None:
    data = MNIST(data_root, validation_size=0)
    data.prepare_data()
    assert data.sizes == {"train": 60_000, "validation": 0, "test": 10_000}
    train = data.split("train")
    assert train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    normal = data.normalize(train.inputs[:20_000])
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01


def test_mnist_subset_is_balanced_and_seeded(data_root: Path) -> None:
    data, same, other = (MNIST(data_root, train_size=2000, test_size=2000, seed=seed) for seed in (0, 0, 1))
    assert data.sizes == {"train": 2000, "validation": 200, "test": 2000}
    assert data.split("train").labels.bincount().tolist() == data.split("test").labels.bincount().tolist() == [200] * 10
    whole = MNIST(data_root, validation_size=0).split("train").labels.bincount()
    assert ((data.split("validation").labels.bincount() - 200 * whole / 60_000).abs() < 1).all()
    for part in ("train", "validation", "test"):
        assert torch.equal(data.split(part).inputs, same.split(part).inputs)
        assert not torch.equal(data.split(part).inputs, other.split(part).inputs)


def test_photographs_from_a_folder(photographs: Path) -> None:
    data = ImageFolder(photographs, train_size=500, validation_size=0.1)
    assert data.sizes == {"train": 500, "validation": 50, "test": 200}
    assert data.class_names == CIFAR10.class_names
    assert data.input_shape == CIFAR10.input_shape
    normal = data.normalize(data.split("train").inputs)
    assert abs(normal.mean()) < 0.3
    assert 0.8 < normal.std() < 1.3
    seen = torch.cat([batch.index for batch in data.train_dataloader()])
    assert torch.equal(seen.sort().values, torch.arange(500))


def test_a_folder_of_photographs_is_split_and_its_copies_are_found(photographs: Path, tmp_path: Path) -> None:
    """As docs/your-images.md has it, in small."""
    photo_folder.main(["--source", str(photographs), "--out", str(tmp_path / "photos"), "--count", "200"])
    data = ImageFolder(tmp_path / "photos", image_size=32, num_workers=0)
    assert sum(data.sizes.values()) == 200
    assert data.sizes["test"] == pytest.approx(40, abs=6)  # groups of two may exceed a class by one
    parts = {name: part for part, name, _ in data.split_list()}
    copies = [name for name in parts if "small_0" in name]
    assert len(copies) == 10
    for name in copies:
        original = next(other for other in parts if other.startswith(name.replace("small_0.jpg", "IMG_0001.")))
        assert parts[name] == parts[original]
