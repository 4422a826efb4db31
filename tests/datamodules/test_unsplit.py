"""Images as people have them: class folders without parts, tables, names in any case; drawn by a key, none twice."""

import csv
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from datamodules import HuggingFaceImages, ImageFolder, ImageTable, near_duplicates
from datamodules.near_duplicates import BITS, MARGIN, SIMILAR, _near_pairs, group_near_duplicates
from datamodules.splits import draw_train_and_validation, draw_whole_groups, proportional_subset
from datamodules.stored_images import StoredImages
from experiments import kd
from harness.runs.folders import write_split
from tests.commands import bad_input, results
from tests.datamodules.test_image_folder import picture

COUNTS = {"ant": 1, "bee": 12, "cat": 20}


def scene(seed: int, size: int = 40) -> Image.Image:
    """A smooth picture, as photographs are: noise of 5 x 5 pixels, enlarged."""
    coarse = np.random.default_rng(seed).integers(64, 192, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """33 pictures of three classes, in several sizes and formats; a copy of cat/00, a smaller one, and a link."""
    root, seed = tmp_path / "photos", 0
    for label, count in COUNTS.items():
        (root / label).mkdir(parents=True)
        for number in range(count):
            seed += 1
            name = f"{number:02}.{['jpg', 'PNG', 'JPEG'][number % 3]}"
            scene(seed, 40 + number).save(root / label / name)
    cats = root / "cat"
    Image.open(cats / "00.jpg").save(cats / "copy.png")
    Image.open(cats / "00.jpg").resize((30, 30)).save(cats / "small.jpg", quality=60)
    (cats / "link.jpg").symlink_to(cats / "00.jpg")
    return root


def made(kind: type[StoredImages], root: Path, **options: Any) -> Any:
    data = kind(root, image_size=8, num_workers=0, **options)  # type: ignore[call-arg]
    data.setup()
    return data


def parts(data: StoredImages) -> dict[str, set[str]]:
    of = dict[str, set[str]]()
    for part, name, _ in data.split_list():
        of.setdefault(part, set()).add(name)
    return of


def test_a_flat_folder_is_split_by_class_and_keeps_copies_together(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "cat" / "notes.txt").touch()
    (photos / "cat" / ".hidden.jpg").touch()
    (photos / "readme.md").touch()
    tested = set()
    for seed in range(6):
        data = made(ImageFolder, photos, seed=seed)
        assert data.class_names == tuple(COUNTS)
        of = parts(data)
        assert sum(map(len, of.values())) == len(set.union(*of.values())) == 36
        assert not any("ant" in name for part in ("validation", "test") for name in of[part])
        copies = {f"cat/{name}" for name in ("00.jpg", "copy.png", "small.jpg", "link.jpg")}
        assert any(copies <= names for names in of.values())
        assert [len(of[part]) for part in ("train", "test", "validation")] == pytest.approx([26, 7, 3], abs=2)
        assert parts(made(ImageFolder, photos, seed=seed)) == of  # the same again
        tested |= of["test"]
    assert len(tested) > 18  # other seeds, other images
    told = capsys.readouterr().err
    assert f"ImageFolder: skipped in {photos}: 1 .txt, 1 hidden, 1 outside a class\n" in told
    assert "ImageFolder: near duplicates: images 4, groups 1, each kept in one part\n" in told
    assert "ImageFolder: there is no test set: split by class, as seed 0 draws: train " in told
    assert "; too small to be tested: ant\n" in told


def test_sizes_are_those_of_the_flags(photos: Path) -> None:
    counts = {"test_size": 8, "validation_size": 5, "train_size": 10}
    assert made(ImageFolder, photos, **counts).sizes == {"train": 10, "validation": 5, "test": 8}
    assert made(ImageFolder, photos, test_size=0.5, validation_size=0).sizes["test"] == 18
    expected = "data.test_size 34: expected at most 33 of the 36 samples, as one of each class has to train"
    assert bad_input(lambda: made(ImageFolder, photos, test_size=34)).startswith(expected)
    for size in (0, 1.0, -0.1):
        assert bad_input(lambda size=size: ImageFolder(photos, test_size=size)).startswith(f"data.test_size {size}: ")


def test_without_groups_the_draw_is_that_of_single_samples() -> None:
    labels = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0))
    alone = torch.arange(200)
    assert draw_whole_groups(labels, 50, 3, alone).equal(proportional_subset(labels, 50, 3))
    pairs = alone // 2
    drawn = draw_whole_groups(labels, 50, 3, pairs)
    assert len(drawn) == pytest.approx(50, abs=4)
    assert (pairs[drawn].unique(return_counts=True)[1] == 2).all()
    whole = draw_whole_groups(labels, 50, 3, torch.zeros(200, dtype=torch.int64))
    assert not len(whole)  # one of each class has to train


def test_equal_and_nearly_equal_images_are_found(tmp_path: Path) -> None:
    for number in range(40):
        picture(tmp_path / "a" / f"{number}.png", number)
        scene(number).save(tmp_path / "a" / f"scene{number}.png")
    scene(7).save(tmp_path / "a" / "quality.jpg", quality=50)
    scene(7).resize((64, 64)).save(tmp_path / "a" / "size.png")
    scene(8).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "a" / "mirror.png")
    data = ImageFolder(tmp_path)
    data.class_names = ("a",)
    files = data._files([(path, "a") for path in sorted((tmp_path / "a").iterdir())])
    groups = group_near_duplicates(files, 0)
    names = [files.short_name(place).removeprefix("a/") for place in range(len(groups))]
    same = {name for name, group in zip(names, groups, strict=True) if group == groups[names.index("scene7.png")]}
    assert same == {"scene7.png", "quality.jpg", "size.png"}
    assert len(groups.unique()) == len(groups) - 2


def test_images_are_looked_at_once_for_all_runs(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = list[int]()
    look = near_duplicates._look
    monkeypatch.setattr(near_duplicates, "_look", lambda image: looked.append(1) or look(image))
    first, told = parts(made(ImageFolder, photos)), capsys.readouterr().err
    assert len(looked) == 36
    assert (parts(made(ImageFolder, photos, train_size=5))["test"], len(looked)) == (first["test"], 36)
    (kept,) = (photos / ".apprentice").iterdir()
    content = bytearray(kept.read_bytes())
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # damaged
    capsys.readouterr()
    assert (parts(made(ImageFolder, photos)), len(looked), kept.read_bytes()) == (first, 72, content)
    assert capsys.readouterr().err == told  # the cache is no file that is skipped
    scene(99).save(photos / "cat" / "01.PNG")  # another image
    made(ImageFolder, photos)
    assert len(looked) == 108
    (tmp_path / "file").touch()
    elsewhere = made(ImageFolder, photos, cache_dir=tmp_path / "file" / "folder")  # none that can be written
    assert (parts(elsewhere).keys(), len(looked)) == (first.keys(), 144)
    made(ImageFolder, photos, cache_dir=tmp_path / "elsewhere")
    assert len([*(tmp_path / "elsewhere").iterdir()]) == 1


def test_many_similar_images_are_linked_by_few_pairs() -> None:
    random = np.random.default_rng(0)
    kinds = random.integers(60, 200, (20, 8, 9, 3))
    thumbnails = (kinds[random.integers(0, 20, 600)] + random.integers(-9, 10, (600, 8, 9, 3))).astype(np.uint8)
    grey, levels = thumbnails.sum(-1, dtype=np.int16), thumbnails.reshape(600, -1).astype(np.int16)
    bits = (grey[:, :, 1:] - grey[:, :, :-1] > MARGIN).reshape(600, -1)
    near = ((bits[:, None] != bits).sum(-1) <= BITS) & (np.abs(levels[:, None] - levels).max(-1) <= SIMILAR)
    expected = connected_components(near, directed=False)[1]
    pairs = np.concatenate([*_near_pairs(thumbnails)], axis=1)
    links = coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), shape=near.shape)
    assert (connected_components(links, directed=False)[1] == expected).all()
    assert len({*expected.tolist()}) < 600
    assert pairs.shape[1] < 8 * 600


def test_parts_that_whole_groups_can_not_make_up_are_refused(tmp_path: Path) -> None:
    for number in range(40):  # a fixed camera: one group
        picture = scene(number // 20)
        picture.putpixel((number, 0), (0, 0, 0))
        (tmp_path / "ab"[number // 20]).mkdir(exist_ok=True)
        picture.save(tmp_path / "ab"[number // 20] / f"{number}.png")
    expected = "data.group_duplicates true: expected false: groups of near duplicates are too large to part; 0 of "
    assert bad_input(lambda: made(ImageFolder, tmp_path)) == f"{expected}8 test samples are drawn of whole groups"
    assert made(ImageFolder, tmp_path, group_duplicates=False).sizes == {"train": 29, "validation": 3, "test": 8}
    labels, groups = torch.arange(40) // 20, torch.arange(40) // 10
    refused = bad_input(lambda: draw_train_and_validation(labels, None, 4, 0, "balanced", groups))
    assert refused == f"{expected}4 validation samples are drawn of whole groups"
    refused = bad_input(lambda: draw_train_and_validation(labels, 30, 10, 0, "balanced", groups))
    assert refused == "data.train_size 30: expected at most 20: near duplicates stay in one part"


def test_copies_of_several_classes_are_told(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(photos / "cat" / "05.JPEG", photos / "bee" / "same.jpg")
    of = parts(made(ImageFolder, photos))
    assert any({"cat/05.JPEG", "bee/same.jpg"} <= names for names in of.values())
    told = "near duplicates in several classes: groups 1, such as bee/same.jpg and cat/05.JPEG\n"
    assert told in capsys.readouterr().err
    made(ImageFolder, photos, group_duplicates=False)
    assert "near duplicates" not in capsys.readouterr().err


def test_damaged_images_and_empty_classes(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "bee" / "03.jpg").write_bytes(b"no image")
    expected = f"data.root {photos}/bee/03.jpg: expected an image that can be read ("
    assert bad_input(lambda: made(ImageFolder, photos)).startswith(expected)
    data = made(ImageFolder, photos, on_error="skip")
    assert sum(data.sizes.values()) == 35
    assert "1 damaged" in capsys.readouterr().err
    (photos / "dog").mkdir()
    assert "Found no valid file for the classes dog" in bad_input(lambda: made(ImageFolder, photos))
    assert "a folder; `data ImageTable` reads" in bad_input(lambda: made(ImageFolder, photos / "bee" / "00.jpg"))


@pytest.mark.parametrize("names", [("Train", "TEST", "Val"), ("training", "Testing", "VALID")])
def test_names_of_parts_in_any_case(tmp_path: Path, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in zip(names, (6, 4, 2), strict=True):
        for number in range(count):
            picture(tmp_path / name / ["a", "b"][number % 2] / f"{number}.png", number)
    assert made(ImageFolder, tmp_path).sizes == {"train": 6, "validation": 2, "test": 4}
    assert not capsys.readouterr().err
    shutil.rmtree(tmp_path / names[1])
    assert made(ImageFolder, tmp_path, validation_size=2).sizes == {"train": 4, "validation": 2, "test": 2}
    shutil.rmtree(tmp_path / names[2])
    capsys.readouterr()
    assert made(ImageFolder, tmp_path, validation_size=1, test_size=2).sizes["train"] == 3
    assert f"{tmp_path}/test is not there: test images are drawn from {names[0]}/" in capsys.readouterr().err
    picture(tmp_path / "train2" / "a" / "0.png", 0)
    (tmp_path / "train2").rename(tmp_path / names[0].swapcase())
    assert "one folder train" in bad_input(lambda: made(ImageFolder, tmp_path))


@pytest.mark.parametrize("name", ["train", "Test", "val"])
def test_a_class_may_have_the_name_of_a_part(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        picture(tmp_path / ["airplane", "car", name][number % 3] / f"{number}.png", number)
    (tmp_path / name / ".hidden").mkdir()
    data = made(ImageFolder, tmp_path, test_size=3, validation_size=0)
    assert data.class_names == tuple(sorted(["airplane", "car", name]))
    assert f"{name}/ beside other folders, and without class folders: taken for a class\n" in capsys.readouterr().err
    for other in ("airplane", "car"):
        shutil.rmtree(tmp_path / other)
    assert bad_input(lambda: made(ImageFolder, tmp_path)).startswith(f"data.root {tmp_path}: expected images (")


def rows_of(photos: Path, **columns: Any) -> list[dict[str, str]]:
    files = sorted(path.relative_to(photos).as_posix() for path in photos.glob("[!.]*/*"))
    return [{"file_name": file, "Label": file.split("/")[0]} for file in files]


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",", mark: bool = False) -> Path:
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(table.getvalue(), "utf-8-sig" if mark else "utf-8")
    return path


def test_a_table_has_the_samples_of_the_folder(photos: Path, tmp_path: Path) -> None:
    expected = made(ImageFolder, photos)
    tables = [write_csv(photos / "a.csv", rows_of(photos)), write_csv(photos / "b.csv", rows_of(photos), ";", True)]
    elsewhere = write_csv(tmp_path / "c.tsv", rows_of(photos), "\t")
    for table in (*tables, elsewhere):
        data = made(ImageTable, table, folder=photos if table == elsewhere else None)
        assert data.split_list() == expected.split_list()
        assert data.fingerprint() == expected.fingerprint()
    again = [dict(zip(("split", "path", "label"), row, strict=True)) for row in expected.split_list()]
    data = made(ImageTable, write_csv(tmp_path / "split.csv", again), folder=photos)
    assert data.sizes == expected.sizes
    for part in data.sizes:
        for one, other in zip(data.split(part), expected.split(part), strict=True):
            assert one.equal(other)


def test_a_list_of_a_run_with_noise_has_the_true_labels(photos: Path, tmp_path: Path) -> None:
    clean, noisy = made(ImageFolder, photos), made(ImageFolder, photos, label_noise=0.4)
    write_split(tmp_path, noisy)
    with (tmp_path / "split.csv").open() as file:
        trained = [row["trained_label"] for row in csv.DictReader(file)]
    wrong = [label != row[2] for label, row in zip(trained, clean.split_list(), strict=True)]
    assert sum(wrong) == sum(wrong[: clean.sizes["train"]]) == round(0.4 * clean.sizes["train"])
    again = made(ImageTable, tmp_path / "split.csv", folder=photos)
    for part in again.sizes:
        assert again.split(part).labels.equal(clean.split(part).labels)


def test_classes_that_are_numbers_are_in_their_order(photos: Path) -> None:
    numbers = {name: str(10 - number) for number, name in enumerate(COUNTS)}
    rows = [row | {"Label": numbers[row["Label"]]} for row in rows_of(photos)]
    data = made(ImageTable, write_csv(photos / "a.csv", rows))
    assert data.class_names == ("8", "9", "10")
    assert sum(data.sizes.values()) == 36


def test_tables_that_can_not_be_used_are_refused(photos: Path) -> None:
    def refused(change: Any, **options: Any) -> str:
        rows = rows_of(photos)
        rows = change(rows) or rows
        return bad_input(lambda: made(ImageTable, write_csv(photos / "a.csv", rows), **options))

    start = f"data.root {photos}/a.csv: expected "
    assert refused(lambda rows: [{"x": row["file_name"], "y": row["Label"]} for row in rows]) == (
        f"data.image path, file, …: expected a column of {photos}/a.csv, one of x, y"
    )
    assert refused(lambda _: None, label="breed").startswith("data.label breed: expected a column of")
    assert refused(lambda rows: rows[3].update(file_name="no.jpg")) == (
        f"{start}files below {photos} (`data.folder`); that of row 5, no.jpg, is not"
    )
    assert refused(lambda rows: [row.update(file_name=f"{i}.jpg") for i, row in enumerate(rows)] and rows).endswith(
        "that of row 2, 0.jpg, is not, nor 35 more"
    )
    assert refused(lambda rows: rows[3].update(Label="")).endswith("row 5 has no label")
    assert refused(lambda rows: rows.append(dict(rows[0]))).endswith("rows 2 and 38 have ant/00.jpg")
    assert refused(lambda rows: [row | {"split": "fold1"} for row in rows]).endswith("row 2 has fold1")
    assert refused(lambda rows: [row | {"split": "test"} for row in rows]).startswith("data.split split: expected rows")
    (photos / "a.csv").write_bytes(b"path,label\n\xe9.jpg,a\n")
    assert bad_input(lambda: made(ImageTable, photos / "a.csv")).startswith(f"{start}a table in CSV and UTF-8")
    (photos / "a.csv").write_text("path,label\na.jpg\n")
    assert bad_input(lambda: made(ImageTable, photos / "a.csv")).endswith("row 2 has 1")
    (photos / "a.csv").write_text("path,label\n")
    assert bad_input(lambda: made(ImageTable, photos / "a.csv")).endswith("it has no rows")
    assert "No such file" in bad_input(lambda: made(ImageTable, photos / "b.csv"))


@pytest.mark.extras("datasets")
def test_a_set_of_the_hub_without_a_test_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"image": [scene(i // 2 * 2) for i in range(20)], "label": [i // 2 % 2 for i in range(20)]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns, features=features)}).save_to_disk(tmp_path)
    data = HuggingFaceImages(str(tmp_path), test_size=4, validation_size=4, num_workers=0)
    assert data.sizes == {"train": 12, "validation": 4, "test": 4}
    rows = {name: part for part, name, _ in data.split_list()}
    assert all(rows[f"train[{i}]"] == rows[f"train[{i + 1}]"] for i in range(0, 20, 2))  # copies are in pairs
    assert [*(tmp_path / ".apprentice").iterdir()]  # the groups, for later runs
    told = capsys.readouterr().err
    assert "HuggingFaceImages: the split test is not there: test images are drawn from train\n" in told
    assert "near duplicates: images 20, groups 10, each kept in one part\n" in told


def test_a_run_writes_its_split_and_goes_on_with_it_alone(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", "ImageFolder", "--data.root", str(photos), "--data.image_size", "8", "--teacher", "LightNN"]
    flags += ["--only", "ce", "--trainer.max_epochs", "1", "--data.num_workers", "0"]
    out = tmp_path / "run"
    kd.main([*flags, "--seeds", "1", "--out", str(out)])
    written = (out / "split.csv").read_text()
    listed = made(ImageFolder, photos).split_list()
    assert written == "".join(f"{','.join(row)}\n" for row in [("split", "path", "label"), *listed])
    kd.main(["--resume", "true", "--seeds", "2", "--out", str(out)])
    assert (out / "split.csv").read_text() == written
    assert results(out)["data"]["test"] == sum(part == "test" for part, _, _ in listed)
    (photos / "bee" / "00.jpg").unlink()
    capsys.readouterr()
    for flags, why in (
        (["--resume", "true", "--out", str(out)], f"the samples with which the run in {out} began"),
        (
            ["--data", "ImageTable", "--data.root", str(out / "split.csv"), "--data.folder", str(photos)],
            "bee/00.jpg, is not",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            kd.main(flags)
        assert stop.value.code == 2
        assert why in capsys.readouterr().err.splitlines()[-1]
