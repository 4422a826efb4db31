"""Whether an exported file, run elsewhere, answers as the net that was exported."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.studies.deploy import answer
from harness.studies.deploy.formats import WEIGHTS

PROJECT = Path(__file__).parents[3]
FLOAT_MARGIN = 1e-4  # of the top two logits
INT8_SHARE, INT8_MARGIN = 1e-3, 0.02  # of predictions; of the logits' range: kernels round differently
SECONDS, LATE = 600.0, "took too long"  # for a file's answers


def disagreement(expected: Tensor, found: Tensor, exact: bool, share: float = INT8_SHARE) -> str:
    """What is wrong with logits (N, classes), compared with those expected; empty if nothing is.

    If `exact`, predictions may differ only where the top two logits are closer than 1e-4; else a share of them may,
    where they are closer than 2 % of the logits' range.
    """
    differ = expected.argmax(1) != found.argmax(1)
    top = expected.topk(2, 1).values
    margins = (top[:, 0] - top[:, 1])[differ]
    allowed = FLOAT_MARGIN if exact else INT8_MARGIN * float(expected.max() - expected.min())
    if not found.isfinite().all():
        return "its logits are not finite"
    if len(margins) and (apart := float(margins.max())) >= allowed:
        return f"a prediction differs whose top two logits are {apart:.2g} apart, not below {allowed:.2g}"
    if not exact and len(margins) > share * len(expected):
        return f"{len(margins)} of {len(expected)} predictions differ, more than {share:.1%}"
    return ""


def answers(files: Sequence[Path], images: Tensor) -> dict[Path, Tensor | str]:
    """Logits (N, classes) of images (N, C, H, W) by each file, read in a fresh process, or a line why there are none.

    The process does not have this project, but for weights alone, which need their net's class.
    """
    weights = [path for path in files if path.name == WEIGHTS]
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "images.npy"
        np.save(stored, images.numpy())
        found = _ask([path for path in files if path not in weights], stored, {})
        return found | _ask(weights, stored, {"paths": [str(PROJECT), str(Path.cwd())]})


def _ask(files: Sequence[Path], images: Path, more: Mapping[str, object]) -> dict[Path, Tensor | str]:
    """Their answers; a file at which the process dies costs the others a new one."""
    found: dict[Path, Tensor | str] = {}
    while missing := [path for path in files if path not in found]:
        with tempfile.TemporaryDirectory() as folder:
            outputs = {path: Path(folder) / f"{number}.npy" for number, path in enumerate(missing)}
            places = {str(path.resolve()): str(out) for path, out in outputs.items()}
            job = Path(folder) / "job.json"
            job.write_text(json.dumps({"images": str(images), "files": places, **more}))
            command = [sys.executable, "-I", answer.__file__, str(job)]
            try:
                run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
                last = ["", *filter(str.strip, run.stderr.splitlines())][-1]
                end = f"ended with exit code {run.returncode}: {_line(last)}"
            except subprocess.TimeoutExpired:
                end = LATE
            for path, out in outputs.items():
                if out.exists():
                    found[path] = torch.from_numpy(np.load(out))
                elif out.with_suffix(".txt").exists():
                    found[path] = _line(out.with_suffix(".txt").read_text())
                else:
                    if end != LATE or path == missing[0]:  # else those before it may have taken the time
                        found[path] = f"its process {end}"
                    break
    return found


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
