"""A folder of images: decoded exactly, only what is chosen, and each fault named in one line."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from apprentice.errors import BadInput
from datamodules import ImageData, ImageFolder, image_sources, memory
from experiments import kd
from tests.commands import bad_input, refused


def picture(path: Path, seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> None:
    """A file of random pixels; `size` is width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    Image.fromarray(pixels[..., :3]).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """7 cats and 5 dogs to train, 3 of each to test, of 12 x 10 pixels, among them grey ones and one with a palette."""
    for part, label, count in (("train", "cat", 7), ("train", "dog", 5), ("test", "cat", 3), ("test", "dog", 3)):
        for i in range(count):
            picture(tmp_path / part / label / f"{i}.png", i, mode=["RGB", "L", "P"][i % 3])
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def refuse(data: ImageFolder) -> str:
    return bad_input(data.setup)


@pytest.mark.parametrize("large", [1, 10**6], ids=["threads", "plain"])
def test_images_are_pils_pixels_in_order(root: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(image_sources, "LARGE", large)
    data = ImageFolder(root, validation_size=0)
    data.setup()
    assert (data.input_shape, data.class_names, data.num_classes) == ((3, 10, 12), ("cat", "dog"), 2)
    for part, cats, dogs in (("train", 7, 5), ("test", 3, 3)):
        split = data.split(part)
        assert split.labels.tolist() == [0] * cats + [1] * dogs
        paths = [root / part / "cat" / f"{i}.png" for i in range(cats)]
        paths += [root / part / "dog" / f"{i}.png" for i in range(dogs)]
        for path, pixels in zip(paths, split.inputs, strict=True):
            assert np.array_equal(np.asarray(Image.open(path).convert("RGB")), pixels.permute(1, 2, 0).numpy())


def test_long_decoding_is_told(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageFolder(root, validation_size=0)
    quiet = ImageFolder(root, validation_size=0)
    quiet.setup()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(image_sources, "SILENCE", -1)
    data.setup()
    train, test = (data.sizes[part] for part in ("train", "test"))
    counts = [(done, size) for size in (train, test) for done in range(1, size + 1)]
    told = [f"decoded {done:,} of {size:,} images" for done, size in counts]
    assert capsys.readouterr().out.splitlines() == told


def test_only_chosen_images_are_decoded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = image_sources.ImageFiles.decode

    def counting(self: image_sources.ImageFiles, place: int) -> Image.Image:
        opened.append(self.name(place))
        return original(self, place)

    monkeypatch.setattr(image_sources.ImageFiles, "decode", counting)
    data = ImageFolder(root, train_size=4, validation_size=2, test_size=2)
    assert data.sizes == {"train": 4, "validation": 2, "test": 2}
    assert data.split("train").labels.tolist() == [0, 0, 1, 1]
    assert len(opened) == len(set(opened)) == 8


def test_resized_images_have_short_side_and_middle(root: Path) -> None:
    picture(root / "train" / "cat" / "0.png", 0, size=(40, 20))
    data = ImageFolder(root, image_size=8, validation_size=0)
    data.setup()
    assert data.input_shape == (3, 8, 8)
    small = Image.open(root / "train" / "cat" / "0.png").resize((16, 8), Image.Resampling.BILINEAR).crop((4, 0, 12, 8))
    assert np.array_equal(np.asarray(small), data.split("train").inputs[0].permute(1, 2, 0).numpy())


def test_an_unequal_folder_keeps_both_classes_and_counts_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(7, 95):
        picture(root / "train" / "cat" / f"{i}.png", i)
    data = ImageFolder(root)
    assert data.sizes == {"train": 90, "validation": 10, "test": 6}
    told = capsys.readouterr().err
    cats, dogs = data.split("train").labels.bincount().tolist()
    assert dogs in {4, 5}
    assert f"ImageFolder: training samples of a class: cat {cats}, dog {dogs}\n" in told


GREY = np.array([[0, 1, 40], [128, 254, 255]])  # 8 bits


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("8.png", GREY.astype(np.uint8)),
        ("16.png", (GREY * 257 + [[0, 128, 0], [-128, 0, 0]]).astype(np.uint16)),
        ("16.tiff", (GREY * 257).astype(np.uint16)),
        ("16.pgm", (GREY * 257).astype(np.uint16)),
        ("float.tiff", (GREY / 255).astype(np.float32)),
    ],
)
def test_levels_are_scaled_by_their_depth(root: Path, name: str, values: np.ndarray) -> None:
    Image.fromarray(values).save(root / "train" / "cat" / name)
    files = image_sources.ImageFiles(torch.zeros(1), None, root / "train" / "cat", np.array([name.encode()]))
    found = files.decode(0)
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found), np.repeat(GREY[:, :, None], 3, axis=2))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.array([[0, 255.0]], np.float32), "0 to 255"),
        (np.array([[-0.5, 1]], np.float32), "-0.5 to 1"),
        (np.array([[float("nan"), 1]], np.float32), "nan to nan"),
        (np.array([[0, 70_000]], np.int32), "0 to 70000 in 32 bits"),
        (np.array([[0, 255]], np.int32), "0 to 255 in 32 bits"),
    ],
    ids=str,
)
def test_levels_of_no_known_range_are_refused(root: Path, values: np.ndarray, told: str) -> None:
    path = root / "train" / "dog" / "scan.tiff"
    Image.fromarray(values).save(path)
    expected = "an image of 8 or 16 bits a channel, or floats from 0 to 1; this one has"
    assert refuse(ImageFolder(root, image_size=4)) == f"data.root {path}: expected {expected} {told}"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["0.png", "0.jpg"])
def test_images_are_upright(root: Path, orientation: int, name: str) -> None:
    """`0` is the first file, whose size all have: here that of the picture as it is looked at, 12 x 10."""
    path = root / "train" / "cat" / name
    (root / "train" / "cat" / "0.png").unlink()
    ramp = np.add.outer(np.arange(10) * 20, np.arange(12) * 3).astype(np.uint8)
    stored = ramp.T if orientation >= 5 else ramp
    stored = {2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1], 6: stored[::-1, :], 7: stored[::-1, ::-1],
              8: stored[:, ::-1]}.get(orientation, stored)  # fmt: skip
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif, quality=100)
    data = ImageFolder(root, validation_size=0)
    first = data.split("train").inputs[0, 0].int()
    assert (first - torch.from_numpy(ramp.astype(np.int32))).abs().max() <= (0 if name == "0.png" else 2)


def exif(*entries: tuple[int, int, int, bytes]) -> bytes:
    """EXIF of tags, each with its type, count and value."""
    body = b"".join(struct.pack(">HHI", tag, kind, count) + value for tag, kind, count, value in sorted(entries))
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(entries)) + body + b"\0\0\0\0"


BYTE, ASCII = 1, 2
BAD_TAGS = {
    "resolution in a byte": (ExifTags.Base.XResolution, BYTE, 1, b"\7\0\0\0"),
    "resolution in a text": (ExifTags.Base.XResolution, ASCII, 4, b"abc\0"),
    "width in a text": (ExifTags.Base.ImageWidth, ASCII, 4, b"abc\0"),
}


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("tag", BAD_TAGS.values(), ids=BAD_TAGS)
def test_orientations_are_read_beside_bad_tags(root: Path, tag: tuple[int, int, int, bytes], orientation: int) -> None:
    path = root / "train" / "cat" / "0.jpg"
    picture(path, 0)
    stored = np.asarray(Image.open(path))
    turned = exif((ExifTags.Base.Orientation, 3, 1, struct.pack(">HH", orientation, 0)), tag)
    whole = path.read_bytes()
    path.write_bytes(whole[:2] + b"\xff\xe1" + struct.pack(">H", len(turned) + 2) + turned + whole[2:])
    files = image_sources.ImageFiles(torch.zeros(1), None, path.parent, np.array([b"0.jpg"]))
    expected = np.rot90(stored, -1) if orientation == 6 else stored
    assert np.array_equal(np.asarray(files.decode(0)), expected)
    assert files.first_size() == expected.shape[:2]


def test_a_first_picture_that_can_not_be_read_is_skipped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "train" / "cat" / "0.png").write_bytes(b"no image")
    data = ImageFolder(root, on_error="skip", validation_size=0, num_workers=0)
    assert data.sizes["train"] == 11
    assert data.input_shape == (3, 10, 12)
    assert "1 damaged" in capsys.readouterr().err
    for path in (root / "test").glob("*/*.png"):
        path.write_bytes(b"no image")
    expected = "data.on_error skip: expected images of test that can be read; none of 6 can"
    assert refuse(ImageFolder(root, on_error="skip", num_workers=0)) == expected


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_link_that_leads_nowhere_is_named_where_it_is_read(root: Path, cache: Any) -> None:
    link = root / "train" / "dog" / "9.png"
    link.symlink_to(root / "nowhere.png")
    data = ImageFolder(root, cache=cache, validation_size=0, num_workers=0)
    with pytest.raises(BadInput, match=f"^data.root {link}: expected an image that can be read") as error:
        data.split("train").take(torch.arange(13))
    assert "\n" not in str(error.value)
    data = ImageFolder(root, cache=cache, on_error="skip", num_workers=0)
    assert sum(data.sizes.values()) == 18


def test_folders_within_a_class_are_searched_and_skips_are_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture(root / "train" / "cat" / "indoors" / "deep" / "1.PNG", 1)
    picture(root / "test" / "dog" / "2" / "1.png", 1)
    ImageFolder(root).setup()
    assert "skipped in" in capsys.readouterr().err  # the fixture's
    for path in ("train/cat/.trash/1.png", "train/.cache/1.png", "train/dog/._1.png", "test/.DS_Store"):
        (root / path).parent.mkdir(exist_ok=True)
        picture(root / "one.png", 1)
        (root / "one.png").rename(root / path)
    for path in ("train/cat/1.gif", "train/cat/indoors/2.GIF", "train/stray.png", "test/dog/README"):
        picture(root / "one.gif", 1)
        (root / "one.gif").rename(root / path)
    data = ImageFolder(root, validation_size=0)
    assert data.sizes == {"train": 13, "validation": 0, "test": 7}
    assert data.class_names == ("cat", "dog")
    told = "2 .gif, 1 .txt, 4 hidden, 1 outside a class, 1 without an extension"
    assert capsys.readouterr().err.splitlines()[0] == f"ImageFolder: skipped in {root}: {told}"


def test_names_not_in_utf8_are_refused_at_once(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "ImageFolder", "--data.root", str(root)]
    for part in ("train", "test"):
        (root / part / "cat").rename(root / part / os.fsdecode(b"caf\xe9"))
    (root / "train" / os.fsdecode(b"caf\xe9") / "notes.txt").unlink()
    (root / "train" / ".cache").rmdir()
    refused(
        kd.main, flags, "--data ImageFolder: expected", "classes named in UTF-8; b'caf\\xe9' is not", tmp_path, capsys
    )
    flags[-1] = str(tmp_path / os.fsdecode(b"caf\xe9"))
    refused(kd.main, flags, "--data.root b'", "caf\\xe9': expected text in UTF-8", tmp_path, capsys)


def remove(root: Path, *patterns: str) -> None:
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


EXPECTED, DOG = "expected images (.jpg, ", "train/dog/3.png"
UNREADABLE = "data.root {}/train/dog/3.png: expected an image that can be read ("
OF_ONE_SIZE = "data.image_size None: expected a size to bring all images to"
FAULTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {  # what is done; how the line begins and ends
    "one class": (
        lambda root: remove(root, "*/dog"), "data.root {}: expected at least 2 classes; there is one, cat", "",
    ),
    "no train": (
        lambda root: remove(root, "train"), "data.root {}: " + EXPECTED,
        "or in <class>/; {}/train: No such file or directory",
    ),
    "no class": (lambda root: remove(root, "train/*"), "data.root {}: ", "Couldn't find any class folder in {}/train"),
    "a class in test only": (
        lambda root: picture(root / "test" / "bird" / "0.png", 0), "data.root {}: ", "test/bird is not in train/",
    ),
    "a class in train only": (
        lambda root: picture(root / "train" / "ant" / "0.png", 0), "data.root {}: ", "train/ant is not in test/",
    ),
    "a class without images": (
        lambda root: remove(root, "test/dog/*"), "data.root {}: ",
        "{}/test: Found no valid file for the classes dog",
    ),
    "text": (lambda root: (root / DOG).write_bytes(b"no image"), UNREADABLE, ")"),
    "empty": (lambda root: (root / DOG).write_bytes(b""), UNREADABLE, ")"),
    "truncated": (lambda root: (root / DOG).write_bytes((root / DOG).read_bytes()[:150]), UNREADABLE, ")"),
    "another size": (
        lambda root: picture(root / "test" / "dog" / "2.png", 0, size=(9, 10)),
        f"{OF_ONE_SIZE}, as {{}}/test/dog/2.png is 9x10 and {{}}/train/cat/0.png is 12x10", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_folder_of_images_is_refused(root: Path, fault: str) -> None:
    act, begins, ends = FAULTS[fault]
    act(root)
    message = refuse(ImageFolder(root))
    assert message.startswith(begins.format(root, root))
    assert message.endswith(ends.format(root, root)) if ends else message == begins.format(root, root)


def test_what_would_not_fit_is_refused_before_decoding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "train" / "dog" / "3.png").write_bytes(b"never opened")
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**9)
    large = ImageFolder(root, image_size=20_000, cache="memory")
    assert "18 of 3x20000x20000 take 21.60 GB, 1.00 GB are available" in refuse(large)
    monkeypatch.setattr(memory, "available_bytes", lambda: 18 * 3 * 4 * 4 - 1)
    assert "18 of 3x4x4" in refuse(ImageFolder(root, image_size=4, cache="memory"))
    fits = ImageFolder(root, image_size=4, train_size=6, validation_size=0, test_size=6, seed=1)
    picture(root / "train" / "dog" / "3.png", 0)
    assert fits.sizes["train"] == 6


def test_memory_heeds_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory.available_bytes()
    assert 10**6 < machine < 10**14
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(memory, "CGROUPS", ((limit, used),))
    limit.write_text("5000\n")
    used.write_text("2000\n")
    assert memory.available_bytes() == 3000
    limit.write_text("max\n")
    assert memory.available_bytes() > 10**6


def test_options_come_from_the_command_line(root: Path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    line = f"--data datamodules.ImageFolder --data.root {root} --data.image_size 6 --data.validation_size 2"
    options = [*line.split(), "--data.std", "[1,1,2]", "--data.train_size", "4", "--data.augment", "true"]
    data = parser.instantiate(parser.parse_args(options)).data
    assert (data.std, data.augment, data.sizes) == ((1, 1, 2), True, {"train": 4, "validation": 2, "test": 6})
    fraction = parser.parse_args(["--data", "datamodules.Digits", "--data.validation_size", "0.25"])
    assert parser.instantiate(fraction).data.sizes["validation"] == 359
