"""Experiments on a GPU: they run with their defaults, and report its memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import attention, hardware, kd
from lab.studies.meters import PeakMemory, Stamps
from tests.gpus import on_gpu

pytestmark = pytest.mark.gpu


def meters_measure() -> None:
    device = torch.device("cuda", 0)
    memory, stamps = PeakMemory(device), Stamps(device)
    stamps.mark()
    torch.ones(2**24, device=device).sum()  # 64 MiB, freed at once
    stamps.mark()
    assert 2**26 <= (memory.bytes() or 0) < 2**27
    assert stamps.seconds()[0] > 0


def test_peak_and_time_are_the_gpus(tmp_path: Path) -> None:
    on_gpu(tmp_path, meters_measure)


CASES = ("ddp", "fsdp", "local_sgd", "ddp-exact")
EXPERIMENTS: dict[str, tuple[Any, list[str]]] = {
    "kd": (kd.main, ["--seeds", "1", "--trainer.max_epochs", "2", "--data.train_size", "200"]),
    "hardware": (hardware.main, ["--only", *CASES, "--steps", "3", "--trainer.devices", "1"]),
    "attention": (attention.main, ["--quick", "true", "--dtypes", "float16"]),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs(name: str, tmp_path: Path) -> None:
    main, flags = EXPERIMENTS[name]
    on_gpu(tmp_path, main, [*flags, "--out", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["hardware"]["gpus"]) > 0
    if name == "hardware":
        rows = {row["strategy"]: row for row in results["rows"]}
        assert rows.keys() == {"single", *CASES}
        assert all(min(row["peak_memory_per_rank"]) > 0 for row in rows.values())
        assert max(rows[name]["max_difference"] for name in ("ddp", "fsdp", "local_sgd")) < 1e-9
    if name == "attention":
        assert results["rows"]
