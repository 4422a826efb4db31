"""Exported files, read in this process: fresh ones, as users have, import torch for seconds each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy import infer, verify


def read_here(patch: pytest.MonkeyPatch | None = None) -> None:
    """Have files read again in this process: some tests read theirs in fresh ones, as users do."""
    (patch or pytest.MonkeyPatch()).setattr(verify, "_infer", _infer)


def _infer(files: Sequence[Path], inputs: Path, extra: Mapping[str, object]) -> dict[Path, torch.Tensor | str]:
    outputs = {path: inputs.with_name(f"{len(extra)}-{number}.npy") for number, path in enumerate(files)}
    infer.main({"inputs": inputs, "files": outputs, "paths": []})
    return {
        path: torch.from_numpy(np.load(out)) if out.exists() else verify._line(out.with_suffix(".txt").read_text())
        for path, out in outputs.items()
    }
