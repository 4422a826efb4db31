"""The notebook runs from top to bottom, where it lies, and is committed without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "distillation.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_distils_and_draws() -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    accuracies = dict(line.split(" test accuracy ") for line in said.splitlines() if " test accuracy " in line)
    assert [name.strip() for name in accuracies] == ["teacher", "ce", "kd", "cosine"]
    assert all(0.85 < float(value) <= 1 for value in accuracies.values())
