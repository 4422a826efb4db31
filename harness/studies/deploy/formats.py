"""The files of a net: safetensors for its weights, torch.export and ONNX for the whole of it."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.runs.files import atomic, write_bytes
from harness.studies.isolation import silenced

WEIGHTS, PROGRAM, ONNX = "weights.safetensors", "model.pt2", "model.onnx"
EXTRA = ("export", "onnx", "onnxruntime", "onnxscript", "safetensors")


class Rounded(nn.Module):
    """A net in a shorter type: it takes float32 inputs and gives float32 logits, as all exports do."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        """Logits (b, classes) of images (b, C, H, W)."""
        return self.net(images.to(self.dtype)).float()


def write_weights(net: nn.Module, folder: Path) -> None:
    """Write a bare state dict as safetensors, which holds tensors and no code."""
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().contiguous() for name, value in net.state_dict().items()}
    with atomic(folder / WEIGHTS) as temporary:
        save_file(state, temporary)


def write_program(net: nn.Module, example: Tensor, folder: Path) -> None:
    """Write what torch.export makes of a net in eval mode, for batches of any size of such inputs (b, ...)."""
    buffer = io.BytesIO()
    torch.export.save(_exported(net, example), buffer)
    write_bytes(folder / PROGRAM, buffer.getvalue())


def write_onnx(net: nn.Module, example: Tensor, folder: Path) -> None:
    """Write ONNX that takes one float32 batch of any size, `images`, and gives its `logits`; int8 as Q and DQ nodes."""
    from torch.onnx import export

    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    with silenced("torch.onnx", "onnxscript"):  # their notices to each other
        program = export(_exported(net, example), (example,), dynamo=True, verbose=False, **names)
    assert program is not None
    proto = program.model_proto
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")  # the exporter's notes, half of a small int8 file
    graph.ClearField("value_info")
    write_bytes(folder / ONNX, proto.SerializeToString())


def _exported(net: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    example = example[:1].repeat(3, *[1] * (example.dim() - 1))  # its whole storage is saved along
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        return torch.export.export(net, (example,), dynamic_shapes=({0: batch},))
