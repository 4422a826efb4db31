"""Notebooks as they are committed, and as they run: `python -m tests.notebooks` writes what a run gives into them."""

import re
from pathlib import Path
from typing import Any

import nbformat

from tests import waiting

FOLDER = Path(__file__).parents[1] / "notebooks"
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
# What other processors give otherwise: a digest of float32 weights, and texts that were written.
DRAWN = re.compile(
    r"[0-9a-f]{64}|(?<=temperature 1\.5:\n).*?(?=\n\n)|(?<=    teacher: )[^\n]*|(?<=    student: )[^\n]*", re.DOTALL
)


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str) -> Any:
    """Run a notebook where it lies; the committed one, with the outputs of this run."""
    from nbclient import NotebookClient

    notebook = read(name)
    options = {"kernel_name": "python3", "record_timing": False, "resources": {"metadata": {"path": str(FOLDER)}}}
    NotebookClient(notebook, timeout=int(waiting.LIMIT), **options).execute()
    notebook.metadata.language_info = {"name": "python"}  # not of which version
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> list[str]:
    """What each cell of code prints."""
    return ["".join(o.text for o in cell.outputs if o.output_type == "stream") for cell in code_cells(notebook)]


def words_and_numbers(notebook: Any) -> tuple[list[str], list[float]]:
    """What the cells print, without their numbers with a point and what differs by processor; and these numbers."""
    shown = [DRAWN.sub("…", text) for text in texts(notebook)]
    return [NUMBER.sub("#", text) for text in shown], [float(x) for text in shown for x in NUMBER.findall(text)]


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(file.stem), file)
