"""Writes a net's files: safetensors, torch.export and ONNX."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deploy.export_folder import ONNX, PROGRAM, WEIGHTS, ExportedFile, describe, metadata
from harness.runs.facts import NetFacts
from harness.runs.files import write_bytes
from harness.runs.quiet import notice, silence
from lit_modules.nets.weights import plain_state

METADATA = "metadata.json"  # inside of PROGRAM
EXTRA = ("export", "onnx", "onnxruntime", "onnxscript", "safetensors")


class RoundedNet(nn.Module):
    """A net in a shorter type: it takes float32 inputs and gives float32 logits, as all exports do."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, classes) of images (b, C, H, W)."""
        return self.net(images.to(self.dtype)).float()


def write_files(
    files: Sequence[ExportedFile], net: nn.Module, example: Tensor, folder: Path, facts: NetFacts, place: str | Path
) -> dict[ExportedFile, Exception]:
    """Write these files of a net in eval mode, each by itself; return the errors of those that can't be written.

    `example` has inputs (b, ...) of the net, and `place` is the folder's name in notices.
    """
    errors: dict[ExportedFile, Exception] = {}
    for file in files:
        notice(f"writing {place}/{file.name}")
        try:
            WRITERS[file](net, example, folder, facts)
        except Exception as error:  # noqa: BLE001 - whatever an exporter makes of a net that it can't write
            errors[file] = error
    return errors


def write_weights(net: nn.Module, _: Tensor | None, folder: Path, facts: NetFacts | None = None) -> None:
    """Write a bare state dict, as `weights.pt` has it, as safetensors, which holds tensors apart and no code."""
    from safetensors.torch import save

    plain = plain_state(net.net if isinstance(net, RoundedNet) else net)
    state = {name: value.detach().cpu().contiguous().clone() for name, value in plain.items()}
    write_bytes(folder / WEIGHTS.name, _with_sorted_metadata(save(state, _metadata(facts))))


def _with_sorted_metadata(content: bytes) -> bytes:
    """Sort the metadata in the header of a safetensors file, which the library writes in another order each time.

    The header is JSON after its length in 8 bytes, filled up with spaces: the tensors begin at a multiple of 8.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header |= {"__metadata__": dict(sorted(header.get("__metadata__", {}).items()))}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def write_program(net: nn.Module, example: Tensor, folder: Path, facts: NetFacts | None = None) -> None:
    """Write what torch.export makes of a net in eval mode, for batches of any size of such inputs (b, ...).

    `torch.export.load(FILE, extra_files={"metadata.json": ""})` fills in the facts.
    """
    buffer, content = io.BytesIO(), json.dumps(describe(facts) if facts else {}, ensure_ascii=False)
    torch.export.save(_export(net, example), buffer, extra_files={METADATA: content})
    write_bytes(folder / PROGRAM.name, buffer.getvalue())


def write_onnx(net: nn.Module, example: Tensor, folder: Path, facts: NetFacts | None = None) -> None:
    """Write ONNX that takes one batch of any size, `images` or `tokens`, and gives its `logits`; int8 as Q and DQ."""
    from onnx.helper import set_model_props
    from torch.onnx import export

    inputs = "images" if example.is_floating_point() else "tokens"
    names: dict[str, Any] = {"input_names": [inputs], "output_names": ["logits"]}
    with silence("torch.onnx", "onnxscript"):  # their notices to each other
        program = export(_export(net, example), (example,), dynamo=True, verbose=False, **names)
    assert program is not None
    proto = program.model_proto
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")  # the exporter's notes, half of a small int8 file
    graph.ClearField("value_info")
    set_model_props(proto, _metadata(facts))
    write_bytes(folder / ONNX.name, proto.SerializeToString())


def _metadata(facts: NetFacts | None) -> dict[str, str]:
    return metadata(facts) if facts else {}


def _export(net: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    example = example[:1].repeat(3, *[1] * (example.dim() - 1))  # its whole storage is saved along
    batch = torch.export.Dim("batch")
    with torch.no_grad(), silence("torch.export"):  # of a GRU it warns that it keeps its weights in one piece
        return torch.export.export(net, (example,), dynamic_shapes=({0: batch},))


WRITERS: dict[ExportedFile, Callable[[nn.Module, Tensor, Path, NetFacts], None]] = {
    ONNX: write_onnx,
    PROGRAM: write_program,
    WEIGHTS: write_weights,
}
