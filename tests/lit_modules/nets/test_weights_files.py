"""A user's file of weights, and checkpoints of Lightning's, load without their nets."""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torchvision import models

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Text
from experiments import kd
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import GPT, DeepNN, LightNN, ResNet, Torchvision, ViT, pipeline_stages
from lit_modules.nets.specs import rebuild, to_plain
from lit_modules.nets.weights import load_weights, read_weights
from lit_modules.objectives import Hint, Hinton, SimKD, Sum
from tests.callbacks import Seen
from tests.training import SHAPE, assert_same, digits, net, weights

State = dict[str, Tensor]
KD = [
    "--data", "Digits",
    "--data.train_size", "40", "--data.test_size", "20", "--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1",
]  # fmt: skip


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
    for source_of_weights in ("DEFAULT", str(tmp_path / "w.pt")):
        ours = Torchvision("densenet121", num_classes=7, weights=source_of_weights)
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
    with pytest.raises(BadInput, match=r"one set of weights; it has state_dict and state_dict_ema, of which `teacher"):
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


CPU: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "devices": 1}


def fitted(module: LightningModule, data: Any, folder: Path, *callbacks: Callback, **options: Any) -> str:
    written = ModelCheckpoint(folder / "checkpoints")
    options = {"max_epochs": 1, "enable_model_summary": False, "callbacks": [written, *callbacks], **CPU, **options}
    with quiet():
        Trainer(**options).fit(module, data)
    return written.best_model_path


def test_a_classifier_loads_without_its_net_and_learning_settings(tmp_path: Path) -> None:
    module = LitClassifier(
        LightNN(SHAPE, widths=(8, 4)), optimizer=partial(SGD, lr=0.1, momentum=0.9),
        scheduler=partial(StepLR, step_size=1), seed=3,
    )  # fmt: skip
    path = fitted(module, digits(), tmp_path)
    hyperparameters = torch.load(path, weights_only=True)["hyper_parameters"]
    assert hyperparameters["net"]["init_args"]["widths"] == [8, 4]
    found = LitClassifier.load_from_checkpoint(path)
    assert_same(weights(found), weights(module))
    (optimizer,), (schedule,) = found.configure_optimizers()
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.1, 0.9)
    assert (schedule["scheduler"].step_size, schedule["interval"]) == (1, "epoch")
    assert (found.seed, found.hparams) == (3, module.hparams)


def test_a_language_model_loads_without_its_net(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question " * 40)
    data = Text(str(tmp_path / "a.txt"), block_size=8)
    net = GPT(data.vocab_size, 8, embed_dim=16, num_layers=1, num_heads=2)
    module = LitLanguageModel(net, lr=0.01, tokens_per_character=1.0)
    found = LitLanguageModel.load_from_checkpoint(fitted(module, data, tmp_path, max_epochs=-1, max_steps=2))
    assert_same(weights(found), weights(module))
    assert found.hparams.lr == 0.01


def distillation(teacher: nn.Module) -> Distillation:
    methods = {"kd": Hinton(3.0), "both": Sum([Hinton(), Hint()]), "simkd": SimKD()}
    return Distillation(teacher, {name: (LightNN(SHAPE), each) for name, each in methods.items()}, SHAPE)


def test_a_distillation_loads_with_a_teacher_or_its_weights(tmp_path: Path) -> None:
    teacher = with_seed(1, lambda: DeepNN(SHAPE))
    torch.save(teacher.state_dict(), tmp_path / "weights.pt")
    module = distillation(teacher)
    path = fitted(module, digits(), tmp_path)
    by_net = Distillation.load_from_checkpoint(path, teacher=teacher)
    by_file = Distillation.load_from_checkpoint(path, teacher_weights=tmp_path / "weights.pt")
    for found in (by_net, by_file):
        assert_same(weights(found), weights(module))
        assert_same(weights(found.teacher), weights(teacher))
        assert found.students["kd"].objective.temperature == 3.0
    with pytest.raises(BadInput, match=r"^teacher DeepNN: expected a trained net, or beside it teacher_weights=FILE"):
        Distillation.load_from_checkpoint(path)


def test_a_net_of_anyones_is_given_again(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module = LitClassifier(net)
    path = fitted(module, digits(), tmp_path)
    assert "net" not in module.hparams
    with pytest.raises(TypeError, match="net"):
        LitClassifier.load_from_checkpoint(path)
    again = LitClassifier.load_from_checkpoint(path, net=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert_same(weights(again), weights(module))


@pytest.mark.parametrize("path", ["os.system", "builtins.eval", "nowhere.Net", "torch.nope", "Net", ""])
def test_a_checkpoint_makes_nothing_but_parts_of_modules(path: str) -> None:
    with pytest.raises(BadInput, match=r"^net .*: expected (the import path|a net, an objective)"):
        rebuild({"class_path": path, "init_args": {}})


def test_specs_are_plain_and_make_the_same_again() -> None:
    for value in (LightNN(SHAPE, widths=(4, 2)), Sum([Hinton(2.5), Hint(0.5)]), partial(SGD, lr=0.5), torch.int64):
        spec = to_plain(value)
        assert to_plain(rebuild(spec)) == spec
    assert isinstance(rebuild(to_plain(LightNN(SHAPE))), LightNN)


def test_predictions_are_the_logits_of_the_test_samples_in_order() -> None:
    teacher = with_seed(1, lambda: DeepNN(SHAPE))
    module, data = distillation(teacher), digits()
    samples = data.split("test")
    with quiet():
        (*found,) = Trainer(**CPU, enable_model_summary=False).predict(module, data)  # type: ignore[misc]
        plain_net = Trainer(**CPU, enable_model_summary=False).predict(LitClassifier(teacher), data)
    with torch.no_grad():
        expected = teacher.eval()(data.normalize(samples.inputs))
        kd = module.students["kd"].net.eval()(data.normalize(samples.inputs))
    torch.testing.assert_close(torch.cat(plain_net), expected)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat([each["kd"] for each in found]), kd)
    assert found[0].keys() == {"kd", "both", "simkd"}
    few = module.predict_step(data.normalize(samples.inputs[:4]))["kd"]
    torch.testing.assert_close(few, found[0]["kd"][:4])  # a processor may have another kernel for few rows


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_trainers_flags_for_trying_work(tmp_path: Path) -> None:
    def seen(data: Any, **options: Any) -> list[list[int]]:
        batches, module = Seen(), LitClassifier(LightNN(SHAPE))
        fitted(module, data, tmp_path / "-".join(options), batches, **options)
        assert len(pipeline_stages(module.net)) > 1
        return [batch.index.tolist() for batch in batches.train]

    assert len(seen(digits(), fast_dev_run=True)) == 1
    overfitted = seen(digits(batch_size=25), overfit_batches=2, max_epochs=3)
    assert overfitted == 3 * overfitted[:2]
    limited = seen(digits(batch_size=25), limit_train_batches=2, limit_val_batches=1, max_epochs=2)
    assert len({tuple(index) for index in limited}) == 4
