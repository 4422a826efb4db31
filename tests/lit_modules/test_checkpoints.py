"""Checkpoints of Lightning's: modules load from them without their nets, predict, and are tried by Trainer's flags."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Text
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import GPT, DeepNN, LightNN, pipeline_stages
from lit_modules.nets.recorded import rebuild, to_plain
from lit_modules.objectives import Hint, Hinton, SimKD, Sum
from tests.training import assert_same, digits, weights

SHAPE = (1, 8, 8)
CPU: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "devices": 1}


def fitted(module: LightningModule, data: Any, folder: Path, **options: Any) -> str:
    written = ModelCheckpoint(folder / "checkpoints")
    options = {"max_epochs": 1, "enable_model_summary": False, "callbacks": [written], **CPU, **options}
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
    (optimizer,), (scheduler,) = found.configure_optimizers()
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"], scheduler.step_size) == (0.1, 0.9, 1)
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
    assert torch.equal(module.predict_step(data.normalize(samples.inputs[:4]))["kd"], found[0]["kd"][:4])


class Seen(LitClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        vars(self).setdefault("seen", []).append(batch.index.tolist())
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_trainers_flags_for_trying_work(tmp_path: Path) -> None:
    module = Seen(LightNN(SHAPE))
    fitted(module, digits(), tmp_path, fast_dev_run=True)
    assert len(module.seen) == 1
    module = Seen(LightNN(SHAPE))
    fitted(module, digits(batch_size=25), tmp_path / "overfit", overfit_batches=2, max_epochs=3)
    assert module.seen == 3 * module.seen[:2]
    module = Seen(LightNN(SHAPE))
    fitted(module, digits(batch_size=25), tmp_path / "limit", limit_train_batches=2, limit_val_batches=1, max_epochs=2)
    assert len({tuple(each) for each in module.seen}) == 4
    assert len(pipeline_stages(module.net)) > 1
