"""What an exported folder holds: its files, what each is and who reads it, and what they all say of their net."""

import json
from dataclasses import dataclass
from typing import Any

from harness.runs.facts import NetFacts


@dataclass(frozen=True)
class ExportedFile:
    """A file of an exported folder.

    Args:
        name: of the file.
        content: what it holds, as the model card says.
        reader: what reads it.
    """

    name: str
    content: str
    reader: str


ONNX = ExportedFile("model.onnx", "ONNX", "onnxruntime, without torch")
PROGRAM = ExportedFile("model.pt2", "torch.export", "torch, without this project")
WEIGHTS = ExportedFile(
    "weights.safetensors", "a state dict of the net in `net.yaml`", "load_net, and the net's library"
)
SPEC = ExportedFile("net.yaml", "the net's class and arguments, and its facts", "load_net")
LABELS = ExportedFile("labels.txt", "a class a line, in the order of the logits", "anyone")
USE = ExportedFile("use.py", "a script that answers by `model.onnx`", "Python with numpy, onnxruntime and pillow")
CARD = ExportedFile("README.md", "the model card", "people, and the hub")

FOLDER = (ONNX, PROGRAM, WEIGHTS, SPEC, LABELS, USE, CARD)  # what export.py writes of a net in float32
# What quantize.py writes of a net in each number format, into a folder of that name, beside the SPEC of WEIGHTS; the
# size of a format is that of its last file. Int8 weights mean nothing without their graph; onnxruntime has no
# convolutions in bfloat16.
FORMATS = {
    "float32": (PROGRAM, WEIGHTS, ONNX),
    "bfloat16": (PROGRAM, WEIGHTS),
    "int8-ptq": (PROGRAM, ONNX),
    "int8-qat": (PROGRAM, ONNX),
}
# Folders of a language model in its run's folder, which transformers and peft write and read.
TRANSFORMERS, ADAPTER = "hf", "adapter"


def describe(facts: NetFacts) -> dict[str, Any]:
    """Return what each file with weights says of its net, by name: metadata.json in PROGRAM."""
    inputs = {f"input_{name}": value for name, value in facts.inputs.to_plain().items()}
    rest = {"classes": [*facts.classes], "versions": {**facts.versions}, "commit": facts.commit or ""}
    return {"task": facts.task, **inputs, **rest}


def metadata(facts: NetFacts) -> dict[str, str]:
    """Return `describe` as texts, lists and mappings in JSON: the metadata of ONNX and WEIGHTS."""
    values = describe(facts).items()
    return {key: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for key, x in values}
