"""--save_ckpt: Lightning's checkpoints of a run's nets, which load by themselves and give the table's figures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from datamodules import Digits
from experiments import kd
from harness.runs.nets import load_net
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from tests.commands import left_by_overwriting, results
from tests.training import assert_same, weights

QUICK = ["--data", "Digits", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "150"]
CPU: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "devices": 1}
CPU |= {"enable_checkpointing": False, "enable_model_summary": False}


def digits() -> Digits:
    data = Digits()
    data.setup()
    return data


def check(out: Path, net: str, accuracy: float, metric: str = "acc") -> LitClassifier:
    """The module of a net's checkpoint, which has its logits and its place in the table."""
    folder, data = out / "seed0" / net, digits()
    module = LitClassifier.load_from_checkpoint(folder / "classifier.ckpt", weights_only=True).eval()
    inputs = data.normalize(data.split("test").inputs)
    with torch.no_grad(), quiet():
        net_alone = load_net(folder)
        assert_same(weights(module.net), weights(net_alone))
        assert torch.equal(module(inputs), net_alone.to(memory_format=torch.channels_last)(inputs))
        (tested,) = Trainer(**CPU).test(module, data, verbose=False)
    assert tested[f"test/{metric}"] == pytest.approx(accuracy, abs=1e-7)
    return module


@pytest.mark.parametrize("student", ["ResNet --student.depth 8", "tests.lit_modules.nets.test_pretrained.Many"])
def test_nets_load_by_themselves_and_have_the_tables_accuracy(student: str, tmp_path: Path) -> None:
    only = ["kd"] if "Many" in student else ["kd", "simkd", "--variants.simkd", "SimKD"]
    kind = ["--student.kind", "tuple"] if "Many" in student else []
    flags = [*QUICK, "--teacher", "LightNN", "--student", *student.split(), *kind, "--only", *only]
    kd.main([*flags, "--metric", "f1", "--save_ckpt", "true", "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    for name, entry in {"teacher": found["teacher"], **found["students"]}.items():
        check(tmp_path / "run", name, entry["test_acc"][0])
        module = check(tmp_path / "run", name, entry["test_f1"][0], "f1")
    assert module.configure_optimizers()[0][0].defaults["lr"] == 0.001
    assert not left_by_overwriting(tmp_path / "run", tmp_path)


def test_a_finished_run_gets_them_later(tmp_path: Path) -> None:
    out = tmp_path / "run"
    kd.main([*QUICK, "--teacher", "LightNN", "--only", "kd", "--out", str(out)])
    before = {path: path.read_bytes() for path in out.rglob("weights.pt")}
    assert not list(out.rglob("classifier.ckpt"))
    kd.main(["--out", str(out), "--resume", "true", "--save_ckpt", "true"])
    check(out, "kd", results(out)["students"]["kd"]["test_acc"][0])
    assert {path: path.read_bytes() for path in out.rglob("weights.pt")} == before
