"""What an exported folder holds, as its pages say, and what every exported file says of its net."""

import json
import re
from pathlib import Path

import pytest
import torch

from deploy.export_folder import FOLDER, FORMATS, ONNX, PROGRAM, WEIGHTS, describe, metadata
from deploy.writers import METADATA, write_files
from harness.runs.facts import NetFacts
from lit_modules.nets import LightNN
from tests.net_facts import facts
from tests.training import SHAPE, net

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_name_the_files_of_a_folder_and_of_each_format() -> None:
    (block,) = re.findall(r"^```\n(model\.onnx.*?)^```$", (DOCS / "deploy.md").read_text(), re.DOTALL | re.MULTILINE)
    assert {name for line in block.splitlines() for name in re.split(" {3,}", line)[0].split()} == {
        file.name for file in FOLDER
    }
    table = [line.split("|")[1:-1] for line in (DOCS / "int8.md").read_text().splitlines() if line.startswith("| `")]
    written = {
        name: tuple(cell.strip().startswith("yes") for cell in cells)
        for formats, *cells in table
        for name in re.findall(r"`(\S+)/`", formats)
    }
    assert written == {
        name: tuple(file in files for file in (WEIGHTS, PROGRAM, ONNX)) for name, files in FORMATS.items()
    }


@pytest.mark.extras
def test_exported_files_carry_the_facts(tmp_path: Path) -> None:
    import onnxruntime
    from safetensors import safe_open

    plain, images, known = net(LightNN).eval(), torch.zeros(2, *SHAPE), facts(classes=tuple("è123456789"))
    assert write_files((WEIGHTS, PROGRAM, ONNX), plain, images, tmp_path, known, tmp_path) == {}
    expected = metadata(known)
    with safe_open(tmp_path / WEIGHTS.name, "pt") as file:
        assert file.metadata() == expected
    session = onnxruntime.InferenceSession(tmp_path / ONNX.name)
    assert session.get_modelmeta().custom_metadata_map == expected
    files = {METADATA: ""}
    torch.export.load(tmp_path / PROGRAM.name, extra_files=files)
    values = json.loads(files[METADATA])
    assert values == describe(known)
    assert (values["input_shape"], values["input_mean"], values["task"]) == ([1, 8, 8], [0.3], "classification")
    assert json.loads(expected["classes"])[0] == "è"
    assert NetFacts.read(known.to_plain()) == known
