"""A user's file of weights loads by whatever names torch takes, and of two sets of weights one is chosen and named."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision import models

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from experiments import kd
from harness.runs.nets import load_net, save_net, spec
from lit_modules.distillation import Distillation
from lit_modules.nets import LightNN, ResNet, Torchvision, ViT
from lit_modules.nets.weights import load_weights, read_weights
from lit_modules.objectives import Hinton
from tests.training import SHAPE, assert_same, net

State = dict[str, Tensor]
KD = ["--data.train_size", "40", "--data.test_size", "20", "--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1"]


def changed(state: State, pattern: str, replacement: str) -> State:
    return {re.sub(pattern, replacement, key): value for key, value in state.items()}


FORMS: dict[str, Callable[[nn.Module], State]] = {
    "without counts of batches": lambda n: {k: v for k, v in n.state_dict().items() if "num_batches" not in k},
    "AveragedModel": lambda n: AveragedModel(n).state_dict(),
    "counted operations": lambda n: n.state_dict() | {"total_ops": torch.ones(1), "stem.total_params": torch.ones(1)},
    "DataParallel of a part": lambda n: changed(n.state_dict(), r"^stage1\.", "stage1.module."),
    "compiled parts in DDP": lambda n: changed(n.state_dict(), r"^(stage\d|stem|head)\.", r"module.\1._orig_mod."),
    "Lightning's, compiled": lambda n: changed(n.state_dict(), "^", "model._orig_mod."),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_net_takes_what_torch_loads_strictly(form: str, tmp_path: Path) -> None:
    source, target = (net(ResNet, seed, depth=8) for seed in (1, 2))
    torch.save({"state_dict": FORMS[form](source)}, tmp_path / "w.pt")
    assert load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt") == []
    assert_same(source.state_dict(), target.state_dict())


def test_what_a_lightning_module_has_beside_its_net_is_named(tmp_path: Path) -> None:
    source, target = (net(ResNet, seed, depth=8) for seed in (1, 2))
    state = {"criterion.weight": torch.ones(10)} | changed(source.state_dict(), "^", "model.")
    torch.save({"state_dict": state}, tmp_path / "w.pt")
    with pytest.raises(BadInput, match=r"weights that fit ResNet; unknown: criterion\.weight$"):
        load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")
    assert load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt", partly=True) == ["not loaded: criterion.weight"]
    assert_same(source.state_dict(), target.state_dict())


def densenet(state: State) -> State:
    return changed(state, r"(denselayer\d+\.(?:norm|conv))([12]\.)", r"\1.\2")


def vit(state: State) -> State:
    return changed(changed(state, r"\.mlp\.0\.", ".mlp.linear_1."), r"\.mlp\.3\.", ".mlp.linear_2.")


def small_vit() -> models.VisionTransformer:
    return models.VisionTransformer(32, 16, 1, 2, 8, 16, num_classes=5)


OLD: dict[str, tuple[Callable[[], nn.Module], Callable[[State], State]]] = {
    "densenet": (lambda: models.DenseNet(4, (1, 1), 8, num_classes=5), densenet),
    "vit": (small_vit, vit),
}


@pytest.mark.parametrize("name", OLD)
def test_names_of_older_versions_are_upgraded(name: str, tmp_path: Path) -> None:
    make, older = OLD[name]
    source, target = (with_seed(seed, make) for seed in (1, 2))
    state = older(source.state_dict())
    assert state.keys() != source.state_dict().keys()
    torch.save(state, tmp_path / "w.pt")
    load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")
    assert_same(source.state_dict(), target.state_dict())
    del state[next(iter(state))]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(BadInput, match=r"weights that fit .*; missing: "):
        load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt")


@pytest.mark.slow  # a smaller net: the test above
def test_torchvisions_old_files_are_first_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.densenet121(num_classes=1000)
    named = densenet(source.state_dict())
    monkeypatch.setattr(models.get_model_weights("densenet121"), "get_state_dict", lambda self, **_: dict(named))
    torch.save(changed(named, "^", "module."), tmp_path / "w.pt")
    for weights in ("DEFAULT", str(tmp_path / "w.pt")):
        ours = Torchvision("densenet121", num_classes=7, weights=weights)
        theirs = {key: value for key, value in source.state_dict().items() if not key.startswith("classifier.")}
        assert_same({key: ours.model.state_dict()[key] for key in theirs}, theirs)
        assert ours.model.classifier.weight.shape[0] == 7


def test_layers_that_ask_for_their_version_load_and_are_rebuilt(tmp_path: Path) -> None:
    source = models.mnasnet0_5(num_classes=10)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    ours = Torchvision("mnasnet0_5", weights=str(tmp_path / "w.pt"))
    assert_same(source.state_dict(), ours.model.state_dict())
    save_net(ours, spec("lit_modules.nets.Torchvision", {"name": "mnasnet0_5", "input_shape": [3, 32, 32]}), tmp_path)
    assert_same(load_net(tmp_path).state_dict(), ours.state_dict())


def two_sets(plain: nn.Module, average: nn.Module, kind: str) -> tuple[dict[str, Any], tuple[str, str]]:
    """A checkpoint, and what it calls the weights that are loaded by default, and the others."""
    mean = AveragedModel(average)
    if kind == "timm":
        return {"epoch": 3, "state_dict": plain.state_dict(), "state_dict_ema": average.state_dict()}, (
            "state_dict", "state_dict_ema")  # fmt: skip
    if kind == "torchvision":
        return {"model": plain.state_dict(), "model_ema": mean.state_dict(), "optimizer": {}}, ("model", "model_ema")
    lightning = {"net." + key: value for key, value in average.state_dict().items()}
    current = {"net." + key: value for key, value in plain.state_dict().items()}
    averaging = {"n_averaged": torch.tensor(7)}
    return {"state_dict": lightning, "current_model_state": current, "averaging_state": averaging}, (
        "state_dict", "current_model_state")  # fmt: skip


@pytest.mark.parametrize("kind", ["timm", "torchvision", "Lightning"])
@pytest.mark.parametrize("averaged", [None, False, True])
def test_of_two_sets_of_weights_one_is_chosen_and_named(kind: str, averaged: bool | None, tmp_path: Path) -> None:
    plain, average, target = (net(seed=seed) for seed in (1, 2, 3))
    content, (main, other) = two_sets(plain, average, kind)
    torch.save(content, tmp_path / "w.pt")
    lines = load_weights(target, str(tmp_path / "w.pt"), "teacher_ckpt", averaged=averaged)
    is_average = (kind == "Lightning") if averaged is None else averaged
    assert_same(target.state_dict(), (average if is_average else plain).state_dict())
    taken, left = (main, other) if is_average == (kind == "Lightning") else (other, main)
    assert lines == [f"of two sets of weights {taken} is loaded, not {left}"]


def test_two_sets_are_refused_or_said_where_nothing_chooses(tmp_path: Path) -> None:
    plain, average, file = net(seed=1), net(seed=2), str(tmp_path / "w.pt")
    torch.save(two_sets(plain, average, "timm")[0], file)
    with pytest.raises(BadInput, match=r"one set of weights; it has state_dict and state_dict_ema, of which --teacher"):
        read_weights(file, "weights")
    with pytest.warns(UserWarning, match="of two sets of weights state_dict is loaded, not state_dict_ema"):
        module = Distillation(net(), {"kd": (net(), Hinton())}, input_shape=SHAPE, teacher_weights=file)
    assert_same(module.teacher.state_dict(), plain.state_dict())
    torch.save({"model": plain.state_dict(), "ema_decay": {"rate": 0.9}}, file)
    with pytest.raises(BadInput, match="expected averaged weights beside the others, as state_dict_ema or model_ema"):
        load_weights(net(), file, "teacher_ckpt", averaged=True)
    assert load_weights(net(), file, "teacher_ckpt") == []


def test_a_runs_teacher_keeps_options_that_no_shape_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"num_heads": 4, "dropout": 0.0, "embed_dim": 8, "patch_size": 4, "num_layers": 1}
    options |= {"input_shape": [1, 8, 8], "num_classes": 10}
    save_net(ViT(**options), spec("lit_modules.nets.ViT", options), tmp_path / "teacher")
    flags = [*KD, "--teacher", "ViT", "--teacher_ckpt", str(tmp_path / "teacher" / "weights.pt")]
    flags += ["--teacher.embed_dim", "8", "--teacher.patch_size", "4", "--teacher.num_layers", "1"]
    with pytest.raises(SystemExit):
        kd.main([*flags, "--teacher.num_heads", "2", "--out", str(tmp_path / "run")])
    line = f"error: --teacher.num_heads 2: expected 4, as {tmp_path / 'teacher' / 'net.yaml'} has it\n"
    assert capsys.readouterr().err == line
    kd.main([*flags, "--teacher.num_heads", "4", "--teacher.dropout", "0.5", "--out", str(tmp_path / "run")])


def test_the_command_line_loads_averaged_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, average = (with_seed(seed, lambda: LightNN((1, 8, 8))) for seed in (1, 2))
    torch.save(two_sets(plain, average, "torchvision")[0], tmp_path / "w.pt")
    flags = [*KD, "--teacher", "LightNN", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        kd.main([*flags, "--teacher_ckpt_ema", "true"])
    assert "error: --teacher_ckpt_ema true: expected --teacher_ckpt FILE beside it" in capsys.readouterr().err
    kd.main([*flags, "--teacher_ckpt", str(tmp_path / "w.pt"), "--teacher_ckpt_ema", "true"])
    assert "of two sets of weights model_ema is loaded, not model" in "".join(capsys.readouterr())
    saved = torch.load(tmp_path / "run" / "seed0" / "teacher" / "weights.pt", weights_only=True)
    assert_same(saved, copy.deepcopy(average.state_dict()))
