"""Exported files, read again in a fresh process, and their logits compared with those of their net."""

import atexit
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apprentice.children import following
from deploy import infer
from deploy.agreement import NOT_FINITE, disagreement
from deploy.export_folder import WEIGHTS
from harness.runs.quiet import notice

PROJECT = Path(__file__).parents[1]
SECONDS, LATE = 600.0, "took too long"  # for a file's logits


def fault_of(expected: Tensor, logits: Tensor | str, exact: bool) -> str:
    """Say why a file is left out, given what `read_back` returns for it; empty if it is good.

    If `exact`, logits (N, ..., classes) must agree with those expected as `disagreement` says. Else they must be
    finite: a shorter type rounds as far as its kernels go, and how much is measured.
    """
    if isinstance(logits, str):
        return logits
    if exact:
        return disagreement(expected.flatten(0, -2), logits.flatten(0, -2), exact=True)
    return "" if logits.isfinite().all() else NOT_FINITE


def read_back(files: Sequence[Path], inputs: Tensor) -> dict[Path, Tensor | str]:
    """Compute logits (N, classes) of inputs (N, ...) by each file in a fresh process, or a line why there are none.

    The process does not have this project, but for weights alone, which need their net's class.
    """
    notice("reading each file again in a fresh process")
    weights = [path for path in files if path.name == WEIGHTS.name]
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "inputs.npy"
        np.save(stored, inputs.numpy())
        logits = _infer([path for path in files if path not in weights], stored, {})
        # A net of the user's own is found where this process has found it, as through PYTHONPATH.
        return logits | _infer(weights, stored, {"paths": [str(PROJECT), str(Path.cwd()), *filter(None, sys.path)]})


def _infer(files: Sequence[Path], inputs: Path, extra: Mapping[str, object]) -> dict[Path, Tensor | str]:
    """Run a process for the files; one that dies at a file is started again for the others."""
    logits: dict[Path, Tensor | str] = {}
    while missing := [path for path in files if path not in logits]:
        with tempfile.TemporaryDirectory() as folder:
            outputs = {path: Path(folder) / f"{number}.npy" for number, path in enumerate(missing)}
            places = {str(path.resolve()): str(out) for path, out in outputs.items()}
            job = Path(folder) / "job.json"
            job.write_text(json.dumps({"inputs": str(inputs), "files": places, **extra}))
            command = [sys.executable, "-I", infer.__file__, str(job)]
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                preexec_fn=following(),  # noqa: PLW1509
            )  # fmt: skip
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
