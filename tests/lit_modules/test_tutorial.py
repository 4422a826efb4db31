"""The tutorial's own loops, written out plainly, give the loss curves that Distillation gives."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apprentice import keyed
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN
from lit_modules.objectives import Hinton
from tests.grids import mostly_slow
from tests.training import SHAPE, VARIANTS, LinesLogger, assert_same, digits, fit, net, weights

STEPS = 30


def soft_targets(teacher: nn.Module, student: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The tutorial's train_knowledge_distillation, with T 2 and weights 0.25 and 0.75; less the teacher's entropy."""
    with torch.no_grad():
        teacher_logits = teacher(images)
    student_logits = student(images)
    targets = nn.functional.softmax(teacher_logits / 2, dim=-1)
    soft_prob = nn.functional.log_softmax(student_logits / 2, dim=-1)
    soft_targets_loss = torch.sum(targets * (targets.log() - soft_prob)) / soft_prob.size()[0] * (2**2)
    return 0.25 * soft_targets_loss + 0.75 * F.cross_entropy(student_logits, labels)


def cosine(teacher: nn.Module, student: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The tutorial's train_cosine_loss over ModifiedDeepNNCosine and ModifiedLightNNCosine."""
    with torch.no_grad():
        hidden_t = F.avg_pool1d(torch.flatten(teacher.features(images), 1), 2)
    flat = torch.flatten(student.features(images), 1)
    hidden_loss = nn.CosineEmbeddingLoss()(flat, hidden_t, target=torch.ones(images.size(0)))
    return 0.25 * hidden_loss + 0.75 * F.cross_entropy(student.classifier(flat), labels)


def hint(teacher: nn.Module, student: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The tutorial's train_mse_loss over ModifiedDeepNNRegressor and ModifiedLightNNRegressor."""
    with torch.no_grad():
        map_t = teacher.features(images)
    features = student.features(images)
    logits = student.classifier(torch.flatten(features, 1))
    return 0.25 * nn.MSELoss()(student.regressor(features), map_t) + 0.75 * F.cross_entropy(logits, labels)


def plain(teacher: nn.Module, student: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(student(images), labels)


LOOPS = {"ce": plain, "kd": soft_targets, "cosine": cosine, "hint": hint}


@pytest.mark.parametrize(("name", "dropout"), mostly_slow([*((name, 0.1) for name in LOOPS), ("kd", 0.0)], ("kd", 0.1)))
def test_the_loss_curve_is_the_tutorials(name: str, dropout: float, tmp_path: Path) -> None:
    data = digits(batch_size=64, train_size=400)
    module = Distillation(
        net(DeepNN, seed=1, dropout=0.0).double(),
        {name: (net(LightNN, dropout=dropout).double(), VARIANTS[name]())},
        input_shape=SHAPE,
    )
    student, teacher = net(LightNN, dropout=dropout).double(), net(DeepNN, seed=1, dropout=0.0).double().eval()
    if name == "hint":
        student.regressor = keyed.with_seed(0, lambda: nn.Conv2d(16, 32, kernel_size=3, padding=1)).double()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.001)
    losses, epoch = [], 0
    student.train()
    while len(losses) < STEPS:
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for batch in list(loader)[: STEPS - len(losses)]:
            images = data.normalize(batch.inputs, torch.float64)
            optimizer.zero_grad()
            with keyed.noise(0, len(losses), batch.rows) if dropout else nullcontext():
                loss = LOOPS[name](teacher, student, images, batch.labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    logger = LinesLogger(tmp_path / "log")
    fit(module, data, max_epochs=-1, max_steps=STEPS, precision="64-true", logger=logger, log_every_n_steps=1)
    assert logger.values(f"{name}/train/loss") == pytest.approx(losses, abs=1e-9, rel=0)
    assert losses[-1] < losses[0]


def test_the_older_tutorials_curve_differs_by_the_teachers_entropy() -> None:
    data, teacher = digits(batch_size=64, train_size=128), net(DeepNN, seed=1).double()
    students = {name: (net().double(), Hinton(teacher_entropy=name == "older")) for name in ("kd", "older")}
    module = Distillation(teacher, students, input_shape=SHAPE)
    fit(module, data, max_epochs=2, precision="64-true")
    assert_same(weights(module.students["kd"].net), weights(module.students["older"].net))
    with torch.no_grad():
        p = F.softmax(teacher.eval()(data.normalize(data.split("train").inputs, torch.float64)) / 2, 1)
    entropy = float(-(p * p.log()).sum() / len(p))
    kd, older = ([each[f"{name}/train/kd"] for each in module.training_log.epochs] for name in students)
    assert older == pytest.approx([value + 2**2 * entropy for value in kd], abs=1e-9, rel=0)
