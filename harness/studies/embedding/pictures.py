"""Test images and their nearest neighbours by a teacher and by a student, in report.html."""

import json
from pathlib import Path

from torch import Tensor

from harness.reports.bakeoff.mistakes import ACROSS, Images, picture
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.files import read_text, write_json
from harness.runs.records import reading
from harness.runs.teacher_weights import TEACHER
from lit_modules.embedding.neighbours import nearest

FILE = "neighbours.json"  # in a net's folder: of some places in the test set, the places of their nearest neighbours
SHOWN = 4  # test images


def write_neighbours(folder: Path, embeddings: Tensor) -> None:
    """Write the neighbours of the first samples of a test set, whose embeddings are (n, D), into a net's folder."""
    neighbours, _ = nearest(embeddings[:SHOWN], embeddings, ACROSS - 1, same=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, {str(place): row for place, row in enumerate(neighbours.tolist())})


def read_neighbours(folder: Path) -> dict[int, list[int]]:
    """Read what `write_neighbours` wrote; nothing if it did not."""
    path = folder / FILE
    if not path.is_file():
        return {}
    with reading(path, "out", "neighbours that this run has written, or no such file"):
        return {int(place): [*map(int, neighbours)] for place, neighbours in json.loads(read_text(path)).items()}


def section(results: Results, folder: Path, student: str, images: Images) -> list[Section]:
    """Return the section that shows a student's neighbours below the teacher's, from the folders of a seed's nets."""
    by_net = {name: read_neighbours(folder / name) for name in (TEACHER, student)}
    pngs = [_draw(name, neighbours, by_net[TEACHER], images) for name, neighbours in by_net.items() if neighbours]
    shown = [png for png in pngs if png is not None]
    rows = "In each row a test image, then its nearest by the teacher"
    text = f"{rows}; below, by {student}, of seed {results.seeds[0]}."
    return [Section("Nearest neighbours", text, (), shown)] if shown else []


def _draw(name: str, by_net: dict[int, list[int]], by_teacher: dict[int, list[int]], images: Images) -> bytes | None:
    """Draw samples with their neighbours by a net, and which of them the teacher has; None if they are no images."""
    pixels = images([place for sample, neighbours in by_net.items() for place in (sample, *neighbours)])
    if pixels is None:
        return None
    titles = list[str]()
    for sample, neighbours in by_net.items():
        shared = [] if name == TEACHER else by_teacher.get(sample, [])
        titles += [f"{name}, sample {sample}", *("also the teacher's" if x in shared else "" for x in neighbours)]
    return picture(pixels, titles)
