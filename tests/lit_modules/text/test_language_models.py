"""Language models side by side train as each does alone, and as `LitLanguageModel` trains one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import Text
from lit_modules.distillation import Distillation
from lit_modules.language_models import LanguageModels
from lit_modules.objectives import Hinton
from tests.commands import bad_input
from tests.grids import mostly_slow
from tests.language import gpt, language_model, text
from tests.strategies.test_strategies import STEPS
from tests.training import SHAPE, Outcome, assert_agree, assert_same, fit, net, on, outcome

OPTIONS: dict[str, Any] = {"warmup_steps": 5, "lr": 0.01, "clip_norm": 0.05}
PLACES = ["ddp 2", "fsdp 2", "tensor_parallel 2", "pipeline 2", "param_server 2"]  # others: test_language_model.py


def models(data: Text, *names: str, tied: bool = True, **options: Any) -> LanguageModels:
    of_nets: dict[str, dict[str, Any]] = {"two": {}, "one": {"num_heads": 1}, "deep": {"num_layers": 4}}
    shared = {**data.net_arguments, "dropout": 0.2, "tie_weights": tied}
    nets = {name: gpt(**shared, **of_nets[name]) for name in names}
    return LanguageModels(nets, data.input_shape, data.num_classes, **OPTIONS | options)


def of_net(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    start = f"students.{name}.net."
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}


def trained(path: Path, *names: str, place: str = "auto 1", tied: bool = True, **options: Any) -> Outcome:
    path.mkdir()
    data, tags = text(path), [f"{name}/{tag}" for name in names for tag in ("train/loss", "val/bpc")]
    return outcome(models(data, *names, tied=tied), data, path, tags, **STEPS | on(place) | options)


@pytest.mark.parametrize("place", ["auto 1", "ddp 2 exact 4"])
def test_a_net_has_the_bits_that_it_would_have_alone(tmp_path: Path, place: str) -> None:
    precision = {"precision": "32-true"}
    together = trained(tmp_path / "three", "two", "one", "deep", place=place, **precision)
    for name in ("two", "deep"):
        alone = trained(tmp_path / name, name, place=place, **precision)
        assert_same(of_net(alone[1], name), of_net(together[1], name))


def test_a_net_is_trained_as_a_language_model(tmp_path: Path) -> None:
    _, together = trained(tmp_path / "two", "two", "one")
    data = text(tmp_path)
    module = fit(language_model(data, dropout=0.2, **OPTIONS), data, **STEPS)
    expected = {name.removeprefix("net."): value for name, value in module.state_dict().items()}
    assert_same(of_net(together, "two"), expected, atol=1e-12)


@pytest.mark.parametrize("place", mostly_slow(PLACES, "ddp 2"))
def test_strategies_agree(tmp_path: Path, place: str) -> None:
    tied = not place.startswith(("pipeline", "model_parallel"))
    alone, other = (trained(tmp_path / where, "two", "deep", place=where, tied=tied) for where in ("auto 1", place))
    assert_agree(alone, other)


def test_rates_and_weight_decay_of_a_net(tmp_path: Path) -> None:
    data = text(tmp_path)
    module = models(data, "two", "one", optimizer_options={"one": {"lr": 0.02, "weight_decay": 0.3}})
    fit(module, data, max_epochs=1)
    groups = module.trainer.optimizers[0].param_groups
    assert [group["initial_lr"] for group in groups] == [0.01, 0.01, 0.02, 0.02]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.3, 0.0]
    assert all(p.dim() > 1 for group in groups[::2] for p in group["params"])


def test_a_method_that_asks_a_teacher_needs_one() -> None:
    line = bad_input(Distillation, None, {"kd": (net(), Hinton())}, SHAPE)
    assert line == "teacher None: expected a teacher, from which kd learns"
