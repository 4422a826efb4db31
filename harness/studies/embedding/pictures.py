"""Test images and their nearest neighbours by a teacher and by a student, in report.html."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from harness.reports.bakeoff.mistakes import ACROSS, picture
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.files import read_text, write_json
from harness.runs.records import reading
from lit_modules.embedding.neighbours import nearest

FILE = "neighbours.json"  # in a net's folder: of some places in the test set, the places of their nearest neighbours
SHOWN = 4  # test images
TEACHER = "teacher"

Images = Callable[[Sequence[int]], np.ndarray | None]  # of places in the test set, (k, C, H, W)


def write_neighbours(folder: Path, embeddings: Tensor) -> None:
    """Write the neighbours of the first samples of a test set, whose embeddings are (n, D), into a net's folder."""
    found = nearest(embeddings, embeddings, ACROSS - 1, same=True)[0][:SHOWN].tolist()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, {str(place): places for place, places in enumerate(found)})


def read_neighbours(folder: Path) -> dict[int, list[int]]:
    """Read what `write_neighbours` wrote; nothing if it did not."""
    path = folder / FILE
    if not path.is_file():
        return {}
    with reading(path, "out", "neighbours that this run has written, or no such file"):
        return {int(place): [int(other) for other in others] for place, others in json.loads(read_text(path)).items()}


def section(results: Results, folder: Path, student: str, images: Images) -> list[Section]:
    """Return the section that shows a student's neighbours below the teacher's, from the folders of a seed's nets."""
    by_net = {name: read_neighbours(folder / name) for name in (TEACHER, student)}
    drawn = [draw(name, places, by_net[TEACHER], images) for name, places in by_net.items() if places]
    if not (pngs := [png for png in drawn if png is not None]):
        return []
    text = (
        f"In each row a test image, then its nearest by the teacher; below, by {student}, of seed {results.seeds[0]}."
    )
    return [Section("Nearest neighbours", text, (), pngs)]


def draw(name: str, neighbours: dict[int, list[int]], of_teacher: dict[int, list[int]], images: Images) -> bytes | None:
    """Draw samples with their neighbours by a net, and which of them the teacher has; None if they are no images."""
    rows = [[place, *others] for place, others in neighbours.items()]
    pixels = images([place for row in rows for place in row])
    if pixels is None:
        return None
    titles = []
    for place, *others in rows:
        also = {} if name == TEACHER else of_teacher.get(place, [])
        titles += [f"{name}, sample {place}", *("also the teacher's" if other in also else "" for other in others)]
    return picture(pixels, titles)
