"""GPT with each kind of block trains to the same numbers wherever it is trained, to the bit under `exact`."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lit_modules.nets.attention import bands
from tests.grids import mostly_slow
from tests.language import language_model, text
from tests.strategies.test_strategies import STEPS
from tests.training import Outcome, assert_agree, assert_same, fit, on, outcome, weights

NETS: dict[str, dict[str, Any]] = {
    "experts": {"mlp": "moe", "hidden": 8, "experts": 4, "router_noise": 0.1, "balance": 0.1, "norm": "rms"},
    "llama": {"position": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False, "gate": True, "window": 4},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "position": "rotary", "qk_norm": True, "norm": "rms",
                "mlp": "swiglu", "attention_dropout": 0.2},
    "window": {"window": 2, "sinks": 2, "position": "rotary", "attention_dropout": 0.2},
    "slopes": {"window": 3, "position": "alibi", "softcap": 5.0},
    "latent": {"mixer": "latent", "position": "rotary", "attention_dropout": 0.2},
    "differential": {"mixer": "differential", "num_heads": 4, "head_dim": 4},
    "linear": {"mixer": "linear"},
    "gated": {"mixer": "gated", "conv": 3},
    "delta": {"mixer": "delta", "conv": 4, "position": None},
    "windowed": {"mixer": "windowed", "window": 3, "position": "rotary"},
    "hybrid": {"mixer": "delta", "softmax_every": 2, "norm_place": "sandwich"},
    "olmo": {"position": "rotary", "norm": "rms", "norm_place": "after", "qk_norm": "width", "num_kv_heads": 1,
             "layer_scale": 0.5, "window": 3, "full_every": 2, "local_rope_base": 20.0},
    "windowed hybrid": {"mixer": "windowed", "window": 3, "softmax_every": 3},
}  # fmt: skip
PIPELINE = {"tie_weights": False, "balance": 0.0}  # its stages share no weights, and see no routers
PLACES = ["ddp 3", "fsdp 2", "tensor_parallel 2", "pipeline 2"]
QUICK = ["ddp 3, experts", "tensor_parallel 2, grouped", "pipeline 2, window"]
# Each net on two kinds of hardware, one of them to the bit, and each kind with nets of all families.
TRIED = [f"{PLACES[number % 4]}, {name}" for number, name in enumerate(NETS)]


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are computed in bands in these texts of 8 tokens, too; ranks are forked."""
    monkeypatch.setattr(bands, "SHORTEST", 8)
    monkeypatch.setattr(bands, "BLOCK", 2)


def options_of(name: str, pipelined: bool) -> dict[str, Any]:
    return {"dropout": 0.2} | NETS[name] | (PIPELINE if pipelined else {})


def trained(path: Path, name: str, pipelined: bool, place: str) -> Outcome:
    """After 8 steps."""
    data, options = text(path), options_of(name, pipelined)
    tags = ["train/loss", "val/bpc", *(["train/balance"] if options.get("balance") else [])]
    return outcome(language_model(data, lr=0.01, **options), data, path, tags, **STEPS | {"max_steps": 8} | on(place))


@functools.cache
def alone(name: str, pipelined: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return trained(Path(folder), name, pipelined, "auto 1")


@pytest.mark.parametrize("where", mostly_slow(TRIED, *QUICK))
def test_float64_losses_are_those_of_one_process(where: str, tmp_path: Path) -> None:
    place, _, name = where.partition(", ")
    pipelined = place.startswith("pipeline")
    assert_agree(alone(name, pipelined), trained(tmp_path, name, pipelined, place))


@pytest.mark.parametrize("name", mostly_slow(list(NETS), "window"))
def test_exact_bits_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    pipelined = [*NETS].index(name) % 2 == 0

    def bits(place: str) -> dict[str, Tensor]:
        module = language_model(text(tmp_path), **options_of(name, pipelined))
        return weights(fit(module, text(tmp_path), **on(f"{place} exact 4"), max_epochs=1))

    assert_same(bits("ddp 1"), bits("pipeline 2" if pipelined else "ddp 3"))
