"""What nets take for what: confusion matrices, and the test samples that most of them get wrong."""

import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from harness.reports import samples
from harness.reports.figures import figure
from harness.reports.html import Section
from harness.reports.results import NetResults, Results
from harness.reports.tables import Table
from harness.runs.fonts import drawable
from harness.runs.tensorboard import confusion_figure

MOST_IMAGES = 24  # images
ACROSS = 8
PAIRS = 10  # of classes
MOST_CLASSES, SHADES = 100, 32  # of a matrix
LETTERS = 16  # of a class's name over an image
CAPTION = "Above each its class, what most students and seeds that were wrong took it for, and how many were."

Images = Callable[[Sequence[int]], np.ndarray | None]  # of places in the test set, (k, C, H, W)


def sections(results: Results, images: Images | None = None) -> list[Section]:
    """Return the matrices with the classes that are confused most, and the samples that are."""
    return [Section("Confusion", _frequent(results), pictures=matrices(results)), _confusion_section(results, images)]


def _frequent(results: Results) -> str:
    names = class_names(results)
    rows = [[names[truth], names[taken], f"{100 * share:.1f}"] for truth, taken, share in frequent(results)]
    columns = ["class", "taken for", "of the class's samples, % (mean of all students)"]
    return Table(columns, rows, left=2).markdown() if rows else ""


def _confusion_section(results: Results, images: Images | None) -> Section:
    worst, names, in_set = list_most_confused(results), class_names(results), places(results)
    rows = [[str(in_set[row]), names[truth], names[taken], f"{100 * share:.0f}"] for row, truth, taken, share in worst]
    pixels = images([int(in_set[row]) for row, *_ in worst]) if images and worst else None
    pictures = [] if pixels is None else [picture(pixels, titles(results))]
    columns = ["place in the test set", "class", "taken for", "nets that were wrong, %"]
    text = "" if not worst else Table(columns, rows).markdown() if pixels is None else CAPTION
    return Section("The most confused test samples", text, (), pictures)


def predictions(net: NetResults, count: int) -> np.ndarray:
    """Return the classes (seeds, n) that a net predicted with the seeds that have them."""
    classes = [samples.unpack_classes(stored) for stored in net.samples.get("test_predicted", ()) if stored is not None]
    return np.stack(classes) if classes else np.zeros((0, count), dtype=np.int64)


def confusions(results: Results) -> dict[str, np.ndarray]:
    """Compute, for each net, the shares (classes, classes) of a class's samples, in rows, taken for each class."""
    truth = samples.labels(results)
    size, shares = _classes(results, truth), {}
    for name, net in results.nets.items():
        if len(predicted := predictions(net, len(truth))):
            counts = np.zeros((size, size))
            np.add.at(counts, (np.broadcast_to(truth, predicted.shape), predicted), 1)
            shares[name] = counts / counts.sum(1, keepdims=True).clip(min=1)
    return shares


def matrices(results: Results) -> list[bytes]:
    """Draw each net's `confusions` in percent, as PNGs; none for over 100 classes, which would take megabytes."""
    names, pngs = class_names(results), []
    for net, shares in confusions(results).items() if len(names) <= MOST_CLASSES else ():
        drawn, png, small = confusion_figure(100 * shares, names), io.BytesIO(), io.BytesIO()
        drawn.suptitle(net, parse_math=False)
        drawn.savefig(png, format="png")
        Image.open(png).convert("RGB").quantize(SHADES).save(small, "png", optimize=True)  # a quarter of the bytes
        pngs.append(small.getvalue())
    return pngs


def _classes(results: Results, truth: np.ndarray) -> int:
    largest = [predictions(net, len(truth)).max(initial=0) for net in results.nets.values()]
    return max(len(results.classes), int(max([truth.max(initial=0), *largest])) + 1) if len(truth) else 0


def class_names(results: Results) -> list[str]:
    """Return names of the classes; their numbers where some have none."""
    size = _classes(results, samples.labels(results))
    names = results.classes
    return [str(name) for name in (names if len(names) >= size else range(size))]


def frequent(results: Results) -> list[tuple[int, int, float]]:
    """Find the classes that students confuse most: label, class, share of the label's samples over all students."""
    of_students = [shares for name, shares in confusions(results).items() if name in results.students]
    if not of_students:
        return []
    shares = np.mean(of_students, axis=0)
    np.fill_diagonal(shares, 0)
    order = np.argsort(-shares, axis=None, kind="stable")[:PAIRS]
    pairs = [(int(i // len(shares)), int(i % len(shares))) for i in order]
    return [(truth, taken, float(shares[truth, taken])) for truth, taken in pairs if shares[truth, taken] > 0]


def list_most_confused(results: Results) -> list[tuple[int, int, int, float]]:
    """Find the samples that most nets got wrong: row, label, what most took it for, share of nets that were wrong."""
    truth = samples.labels(results)
    by_student = [predictions(net, len(truth)) for net in results.students.values()]
    predicted = np.concatenate(by_student) if by_student else np.zeros((0, len(truth)), dtype=np.int64)
    if not len(predicted):
        return []
    wrong = (predicted != truth).mean(0)
    confused = []
    for row in np.argsort(-wrong, kind="stable")[: min(MOST_IMAGES, np.count_nonzero(wrong))].tolist():
        others = predicted[predicted[:, row] != truth[row], row]
        confused.append((row, int(truth[row]), int(np.bincount(others).argmax()), float(wrong[row])))
    return confused


def places(results: Results) -> np.ndarray:
    """Return the places (n,) of the tested samples in the test set."""
    stored = results.sampled.get("test_places")
    return np.arange(len(samples.labels(results))) if stored is None else samples.unpack_classes(stored)


def picture(images: np.ndarray, titles: Sequence[str]) -> bytes:
    """Draw a PNG of images (k, C, H, W) with C 1 or 3, each stretched to the full range, under their titles."""
    down = -(-len(images) // ACROSS)
    with figure(11, 1.75 * down) as (drawn, png):
        axes = [*drawn.subplots(down, ACROSS, squeeze=False).flat]
        for place in axes:
            place.axis("off")
        for place, image, title in zip(axes, images, titles, strict=False):
            low, high = image.min(), image.max()
            stretched = (image - low) / (high - low or 1)
            pixels = stretched[0] if len(image) == 1 else stretched.transpose(1, 2, 0)
            place.imshow(pixels, cmap="gray", vmin=0, vmax=1)
            place.set_title(title, fontsize=7, parse_math=False, fontfamily=drawable(titles).fonts)
    return png.getvalue()


def titles(results: Results) -> list[str]:
    """Write for each of the most confused samples what it is, and what most took it for."""
    labels = drawable(class_names(results))
    names = [name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…" for name in labels.names]
    names = [f"class {name}" for name in names] if labels.note else names
    return [
        f"{names[truth]}\nas {names[taken]}, {100 * share:.0f} %"
        for _, truth, taken, share in list_most_confused(results)
    ]
