"""Make a folder of photographs as people have them, from CIFAR-10: to try out docs/your-images.md.

    python benchmarks/photo_folder.py --source cifar10-jpg.tar.xz --out photographs

3,000 files in ten class folders without train/ and test/: unequal classes, sizes from 64 to 320 pixels, wide and tall,
JPEG and PNG with suffixes in upper and lower case, some turned by an EXIF tag, one in a hundred a smaller copy of
another, and a text file. The source has `train/<class>/<number>.jpg`, as a folder or in a tar file.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

SUFFIXES = (".jpg", ".JPG", ".jpeg", ".png", ".PNG")
SIDES = 64, 320  # pixels, of the short side
TURNED, COPIED = 20, 100  # one in so many


def photographs(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield class and content of the training images, in the order of their names."""
    if source.is_dir():
        for path in sorted(source.glob("train/*/*.jpg")):
            yield path.parent.name, path.read_bytes()
        return
    with tarfile.open(source) as archive:
        for member in archive:
            path = Path(member.name)
            file = archive.extractfile(member) if path.suffix == ".jpg" and path.parts[-3] == "train" else None
            if file is not None:
                yield path.parts[-2], file.read()


def make(source: Path, out: Path, count: int) -> None:
    """Write `count` photographs; class k of ten has about as many as 10 - k / 2 parts."""
    by_class: dict[str, list[bytes]] = {}
    for label, content in photographs(source):
        members = by_class.setdefault(label, [])
        if len(members) < count:
            members.append(content)
    draw, labels = np.random.default_rng(0), sorted(by_class)
    parts = np.array([10 - number / 2 for number in range(len(labels))])
    sizes = (count * parts / parts.sum()).astype(int)
    sizes[0] += count - sizes.sum()
    for label, size in zip(labels, sizes.tolist(), strict=True):
        (out / label).mkdir(parents=True)
        copies = max(size // COPIED, 1)
        for number, content in enumerate(by_class[label][: size - copies]):
            image = Image.open(io.BytesIO(content)).convert("RGB")
            side, ratio = int(draw.integers(*SIDES)), float(draw.uniform(1, 1.5))
            longer = round(side * ratio)
            shape = (side, longer) if draw.random() < 0.5 else (longer, side)
            enlarged = image.resize(shape, Image.Resampling.BICUBIC)
            exif = Image.Exif()
            if number % TURNED == 0:  # stored on its side, and turned upright by its tag
                enlarged, exif[ExifTags.Base.Orientation] = enlarged.transpose(Image.Transpose.ROTATE_90), 6
            enlarged.save(out / label / f"IMG_{number:04}{SUFFIXES[number % len(SUFFIXES)]}", exif=exif)
        for number in range(copies):
            original = Image.open(next((out / label).glob(f"IMG_{number + 1:04}.*")))
            original.resize((original.width // 2, original.height // 2)).save(out / label / f"small_{number}.jpg")
    (out / "notes.txt").write_text("from CIFAR-10")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=3000)
    options = parser.parse_args(argv)
    make(options.source, options.out, options.count)
    print(f"{options.out}: {options.count} photographs")


if __name__ == "__main__":
    main()
