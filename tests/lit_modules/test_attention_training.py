"""GPT of today trains to the same numbers wherever it is trained: experts with balanced loads, rotary, hybrid."""

from pathlib import Path
from typing import Any

import pytest

from tests.grids import mostly_slow
from tests.language import language_model, text
from tests.strategies.test_strategies import STEPS
from tests.training import Outcome, assert_agree, assert_same, fit, on, outcome, weights

NETS: dict[str, dict[str, Any]] = {
    "experts": {"mlp": "moe", "hidden": 8, "experts": 4, "router_noise": 0.1, "balance": 0.1, "norm": "rms"},
    "llama": {"position": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False, "gate": True, "window": 4},
    "hybrid": {"mixer": "delta", "softmax_every": 2, "norm_place": "sandwich"},
}
PLACES = ["ddp 2", "ddp 3", "fsdp 2", "tensor_parallel 2"]
GRID = [f"{place}, {name}" for name in NETS for place in PLACES]


def trained(path: Path, name: str, place: str = "auto 1") -> Outcome:
    path.mkdir()
    data, tags = text(path), ["train/loss", "val/bpc", *(["train/balance"] if name == "experts" else [])]
    module = language_model(data, dropout=0.2, lr=0.01, **NETS[name])
    return outcome(module, data, path, tags, **STEPS | on(place))


@pytest.mark.parametrize("where", mostly_slow(GRID, "ddp 2, experts", "tensor_parallel 2, llama"))
def test_float64_losses_are_those_of_one_process(where: str, tmp_path: Path) -> None:
    place, _, name = where.partition(", ")
    assert_agree(trained(tmp_path / "one", name), trained(tmp_path / "other", name, place))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_exact_bits_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    found = []
    for place in ("ddp 1 exact 4", "ddp 2 exact 4"):
        module = language_model(text(tmp_path), dropout=0.2, **NETS[name])
        found.append(weights(fit(module, text(tmp_path), **on(place), max_epochs=1)))
    assert_same(*found)
