"""The notebooks run from top to bottom, where they lie, and are committed without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
ACCURACIES = {  # the least of each net that a notebook tests
    "distillation": {"teacher": 0.85, "ce": 0.85, "kd": 0.85, "cosine": 0.85},
    "your_own_teacher": {"teacher": 0.85, "ce": 0.7, "kd": 0.7, "at": 0.7},
}


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == ACCURACIES.keys()


@pytest.mark.parametrize("name", ACCURACIES)
def test_it_is_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ACCURACIES)
def test_it_distils_and_draws(name: str) -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    found = dict(line.split(" test accuracy ") for line in said.splitlines() if " test accuracy " in line)
    assert [net.strip() for net in found] == list(ACCURACIES[name])
    assert all(ACCURACIES[name][net.strip()] < float(value) <= 1 for net, value in found.items())
