"""Logits of exported files, by a process that has nothing of this project: `python -I infer.py JOB.json`.

JOB holds `inputs`, a .npy of a net's inputs (N, ...), and `files`: where the logits (N, classes) of each file go.
The reason why one can't be read or run goes into a .txt beside it. Files of weights alone need the net's class: for
these `paths` must lead to this project.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256
OURS = {"apprentice", "deploy", "harness", "lit_modules", "datamodules", "strategies"}
Net = Callable[[Any], Any]  # a batch of inputs -> their logits


def onnx(path: str) -> Net:
    """Load ONNX by onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (inputs,) = session.get_inputs()
    return lambda batch: session.run(None, {inputs.name: batch})[0]


def pt2(path: str) -> Net:
    """Load a program by torch; the second import registers the operations of int8."""
    import torch
    import torch.ao.quantization.fx._decomposed

    net = torch.export.load(path).module()
    return lambda batch: net(torch.from_numpy(batch)).detach().numpy()


def safetensors(path: str) -> Net:
    """Load weights into the net's own class."""
    import torch
    from safetensors.torch import load_file

    from harness.runs.nets import load_net

    net = load_net(Path(path).parent, weights=load_file(path))
    dtype = next(net.parameters()).dtype

    def infer(batch: Any) -> Any:
        inputs = torch.from_numpy(batch)
        return net(inputs.to(dtype) if inputs.is_floating_point() else inputs).detach().float().numpy()

    return infer


def main(job: dict[str, Any]) -> None:
    """Write the logits of each file, or the reason why there are none."""
    sys.path[:0] = job.get("paths", [])
    inputs = np.load(job["inputs"])
    for path, out in job["files"].items():
        try:
            net = {".onnx": onnx, ".pt2": pt2, ".safetensors": safetensors}[Path(path).suffix](path)
            logits = np.concatenate([net(inputs[i : i + BATCH]) for i in range(0, len(inputs), BATCH)])
            if "paths" not in job and (ours := OURS & {name.split(".")[0] for name in sys.modules}):
                raise RuntimeError(f"it needs {', '.join(sorted(ours))}")
            unfinished = Path(out).with_suffix(".part.npy")
            np.save(unfinished, logits)
            unfinished.rename(out)
        except Exception as error:  # noqa: BLE001 - whatever a library makes of a broken file
            Path(out).with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
