"""The files of a net, written, read again in a fresh process, and compared: safetensors, torch.export and ONNX."""

import atexit
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.runs.facts import NetFacts
from harness.runs.files import write_bytes
from harness.runs.quiet import silence
from harness.studies.deploy import answer
from lit_modules.nets.weights import plain_state

WEIGHTS, PROGRAM, ONNX = "weights.safetensors", "model.pt2", "model.onnx"
METADATA = "metadata.json"  # inside of PROGRAM
EXTRA = ("export", "onnx", "onnxruntime", "onnxscript", "safetensors")
PROJECT = Path(__file__).parents[3]
FLOAT_MARGIN, FLOAT_SHARE = 1e-4, 1e-3  # of the top two logits; of the logits' range
INT8_SHARE, INT8_MARGIN = 1e-3, 0.02  # of predictions; of the logits' range: kernels round differently
NOT_FINITE = "its logits are not finite"
SECONDS, LATE = 600.0, "took too long"  # for a file's answers


class Rounded(nn.Module):
    """A net in a shorter type: it takes float32 inputs and gives float32 logits, as all exports do."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, classes) of images (b, C, H, W)."""
        return self.net(images.to(self.dtype)).float()


def write_weights(net: nn.Module, folder: Path, facts: NetFacts | None = None) -> None:
    """Write a bare state dict, as `weights.pt` has it, as safetensors, which holds tensors apart and no code."""
    from safetensors.torch import save

    state = {name: value.detach().cpu().contiguous().clone() for name, value in plain_state(net).items()}
    write_bytes(folder / WEIGHTS, save(state, _metadata(facts)))


def write_program(net: nn.Module, example: Tensor, folder: Path, facts: NetFacts | None = None) -> None:
    """Write what torch.export makes of a net in eval mode, for batches of any size of such inputs (b, ...).

    `torch.export.load(FILE, extra_files={"metadata.json": ""})` fills in the facts.
    """
    buffer, content = io.BytesIO(), json.dumps(facts.values() if facts else {}, ensure_ascii=False)
    torch.export.save(_export(net, example), buffer, extra_files={METADATA: content})
    write_bytes(folder / PROGRAM, buffer.getvalue())


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
    write_bytes(folder / ONNX, proto.SerializeToString())


def _metadata(facts: NetFacts | None) -> dict[str, str]:
    return facts.metadata() if facts else {}


def _export(net: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    example = example[:1].repeat(3, *[1] * (example.dim() - 1))  # its whole storage is saved along
    batch = torch.export.Dim("batch")
    with torch.no_grad(), silence("torch.export"):  # of a GRU it warns that it keeps its weights in one piece
        return torch.export.export(net, (example,), dynamic_shapes=({0: batch},))


@dataclass(frozen=True)
class Difference:
    """How a file's answers on the test set differ from the net's."""

    predictions: int  # that are of another class
    max_logit_difference: float


def compare(expected: Tensor, logits: Tensor) -> Difference:
    """Compare logits (N, classes) with those expected."""
    differ = int((expected.argmax(1) != logits.argmax(1)).sum())
    return Difference(differ, float((expected - logits).abs().max()))


def disagreement(expected: Tensor, logits: Tensor, exact: bool, share: float = INT8_SHARE) -> str:
    """Say what is wrong with logits (N, classes), compared with those expected; empty if nothing is.

    If `exact`, predictions may differ only where the top two logits are closer than 1e-4, and no logit by more than
    0.1 % of their range; else a share of predictions may, where they are closer than 2 % of it.
    """
    differ = expected.argmax(1) != logits.argmax(1)
    top = expected.topk(2, 1).values
    margins = (top[:, 0] - top[:, 1])[differ]
    extent = float(expected.max() - expected.min())
    allowed = FLOAT_MARGIN if exact else INT8_MARGIN * extent
    if not logits.isfinite().all():
        return NOT_FINITE
    if len(margins) and (apart := float(margins.max())) >= allowed:
        return f"a prediction differs whose top two logits are {apart:.2g} apart, not below {allowed:.2g}"
    most = compare(expected, logits).max_logit_difference
    if exact and most > max(FLOAT_SHARE * extent, FLOAT_MARGIN):
        return f"a logit differs by {most:.2g}, more than {FLOAT_SHARE:.1%} of their range"
    if not exact and len(margins) > share * len(expected):
        return f"{len(margins)} of {len(expected)} predictions differ, more than {share:.1%}"
    return ""


def answers(files: Sequence[Path], images: Tensor) -> dict[Path, Tensor | str]:
    """Compute logits (N, classes) of inputs (N, ...) by each file in a fresh process, or a line why there are none.

    The process does not have this project, but for weights alone, which need their net's class.
    """
    weights = [path for path in files if path.name == WEIGHTS]
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "images.npy"
        np.save(stored, images.numpy())
        logits = _ask([path for path in files if path not in weights], stored, {})
        # A net of the user's own is found where this process has found it, as through PYTHONPATH.
        return logits | _ask(weights, stored, {"paths": [str(PROJECT), str(Path.cwd()), *filter(None, sys.path)]})


def _ask(files: Sequence[Path], images: Path, extra: Mapping[str, object]) -> dict[Path, Tensor | str]:
    """Run a process for the files; one that dies at a file is started again for the others."""
    logits: dict[Path, Tensor | str] = {}
    while missing := [path for path in files if path not in logits]:
        with tempfile.TemporaryDirectory() as folder:
            outputs = {path: Path(folder) / f"{number}.npy" for number, path in enumerate(missing)}
            places = {str(path.resolve()): str(out) for path, out in outputs.items()}
            job = Path(folder) / "job.json"
            job.write_text(json.dumps({"images": str(images), "files": places, **extra}))
            command = [sys.executable, "-I", answer.__file__, str(job)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            atexit.register(process.kill)  # a signal may end this process now
            with process:
                try:
                    errors = process.communicate(timeout=SECONDS)[1]
                    last = ["", *filter(str.strip, errors.splitlines())][-1]
                    end = f"ended with exit code {process.returncode}: {_line(last)}"
                except subprocess.TimeoutExpired:
                    process.kill()
                    end = LATE
            atexit.unregister(process.kill)
            for path, out in outputs.items():
                if out.exists():
                    logits[path] = torch.from_numpy(np.load(out))
                elif out.with_suffix(".txt").exists():
                    logits[path] = _line(out.with_suffix(".txt").read_text())
                else:
                    if end != LATE or path == missing[0]:  # else those before it may have taken the time
                        logits[path] = f"its process {end}"
                    break
    return logits


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
