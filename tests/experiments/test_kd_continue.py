"""A teacher goes on from somebody's checkpoint as if it had not been interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from experiments import kd
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import ResNet
from tests.commands import Refusal
from tests.training import assert_same, digits, net, trainer

# One batch an epoch and no dropout: then an epoch's number decides nothing.
SIZES = ["--data", "Digits", "--data.train_size", "101", "--data.test_size", "100", "--data.batch_size", "101"]
SIZES += ["--data.validation_size", "0"]
KD = [*SIZES, "--teacher", "ResNet", "--teacher.depth", "8", "--only", "kd", "--seeds", "[0]"]
STEP = ["--scheduler", "StepLR", "--scheduler.step_size", "1", "--scheduler.gamma", "0.5"]


def trained(epochs: int, path: Path) -> LitClassifier:
    """A classifier in float64, and Lightning's checkpoint of it."""
    module = LitClassifier(net(ResNet, depth=8), scheduler=lambda optimizer: StepLR(optimizer, 1, 0.5))
    with quiet():
        fits = trainer(max_epochs=epochs, precision="64-true")
        fits.fit(module, digits(batch_size=101))
        fits.save_checkpoint(path)
    return module


def plain(path: Path) -> dict[str, Any]:
    """What a loop of one's own would have saved in place of Lightning's checkpoint."""
    found = torch.load(path, weights_only=True)
    weights = {key.removeprefix("net."): value for key, value in found["state_dict"].items() if key.startswith("net.")}
    states = {"optimizer": found["optimizer_states"][0], "scheduler": found["lr_schedulers"][0]}
    return {"epoch": 2, "model": weights, **states}


@pytest.mark.parametrize(("kind", "more"), [
    ("plain", []), ("Lightning's", []),
    pytest.param("plain", ["--trainer.strategy", "fsdp", "--trainer.devices", "2"], marks=pytest.mark.slow),
])  # fmt: skip
def test_it_ends_as_if_it_had_not_been_interrupted(kind: str, more: list[str], tmp_path: Path) -> None:
    path, whole = tmp_path / "a.ckpt", trained(4, tmp_path / "whole.ckpt")
    trained(2, path)
    if kind == "plain":
        torch.save(plain(path), path)
    flags = [*KD, *STEP, *more, "--teacher_ckpt", str(path), "--teacher_epochs", "2", "--teacher_continue", "true"]
    kd.main([*flags, "--trainer.max_epochs", "1", "--trainer.precision", "64-true", "--out", str(tmp_path / "run")])
    found = torch.load(tmp_path / "run" / "seed0" / "teacher" / "weights.pt")
    assert_same(found, whole.net.state_dict(), atol=1e-9)


def test_what_does_not_fit_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "a.ckpt"
    trained(1, path)
    found, wide = plain(path), torch.optim.Adam(net(ResNet, depth=14).parameters()).state_dict()
    flags = [*KD, "--teacher_ckpt", str(path), "--teacher_epochs", "1", "--teacher_continue", "true"]
    cases: list[tuple[dict[str, Any], list[str], str]] = [
        (found, [], "--scheduler beside it"),
        (found, [*STEP, "--optimizer", "SGD"], f"the state of SGD in {path}; it is of another optimizer"),
        ({**found, "optimizer": None}, STEP, f"the state of an optimizer in {path}"),
        ({**found, "optimizer": wide}, STEP, "the state of an optimizer of this net's parameters"),
        ({**found, "scheduler": None}, STEP, f"no --scheduler: {path} has no state of one"),
    ]
    for content, more, said in cases:
        torch.save(content, path)
        assert refusal(kd.main, *flags, *more).startswith(f"--teacher_continue true: expected {said}")
