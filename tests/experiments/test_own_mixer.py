"""A mixer of a user's own from the command line, in a folder that has its file alone."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from experiments import export, gpt, kd
from harness.runs.nets import load_net
from tests.commands import Refusal, nets, results
from tests.experiments.test_mixer_students import check_processes_and_a_resume
from tests.own_mixers import EXAMPLE, WRONG
from tests.training import assert_same

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60
DATA = ["--data.path", "a.txt", "--data.block_size", "12", "--data.batch_size", "6"]
STEPS = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--model.warmup_steps", "2"]


def sizes(key: str, mixer: str = "mymixer.Mean", **options: str) -> list[str]:
    given = {"num_layers": "2", "num_heads": "2", "embed_dim": "8", "mixer": mixer, "position": "null", **options}
    return [part for name, value in given.items() for part in (f"--{key}.{name}", value)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, code in {"a.txt": TEXT, "mymixer.py": EXAMPLE, "wrong.py": WRONG}.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("mymixer", "wrong"):
        sys.modules.pop(name, None)
