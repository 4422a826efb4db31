"""BatchNorm without running statistics: eval mode uses the batch's, too, and any number of ranks is as one."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from apprentice.keyed import with_seed
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.objectives import Hinton
from tests.training import SHAPE, assert_same, digits, fit, net, on, trainer, weights


def normalised(seed: int) -> nn.Sequential:
    def build() -> nn.Sequential:
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.Tanh(), nn.Linear(16, 10))

    return with_seed(seed, build)


def distillation(**options: object) -> Distillation:
    students = {"kd": (net(), Hinton())}
    return Distillation(normalised(1), students, SHAPE, optimizer=partial(SGD, lr=0.1), **options)


def distilled(place: str) -> dict[str, Tensor]:
    return weights(fit(distillation(), digits(), **on(place), precision="64-true"))


def test_a_teacher_gives_the_global_batch_its_statistics_and_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = distilled("auto 1")
    line = "teacher's outputs are not stored: they depend on the batch, by its statistics in 2\n"
    assert line in capsys.readouterr().out
    assert_same(one, distilled("ddp 3"), atol=1e-12)
    fit(distillation(teacher_cache_dir=tmp_path), digits())
    assert not list(tmp_path.iterdir())


def test_exact_shards_have_the_same_bits_on_any_number_of_ranks() -> None:
    assert_same(distilled("ddp 1 exact 4"), distilled("ddp 3 exact 4"))


def test_a_teacher_is_that_of_torch_in_training_and_evaluation() -> None:
    images, plain = torch.rand(9, *SHAPE), normalised(1).eval()
    module = distillation()
    for mode in (True, False):
        module.train(mode)
        assert not module.teacher.training
        torch.testing.assert_close(module.predict_beside_teacher(images)[0], plain(images))


@pytest.mark.parametrize("exact", ["", " exact 4"])
def test_nets_that_are_trained_and_scored_are_named_and_the_same_on_any_number_of_ranks(exact: str) -> None:
    data, values = digits(batch_size=8, train_size=20, validation_size=0.3, test_size=10), []
    for place in (f"ddp 1{exact}", f"ddp 3{exact}"):
        with pytest.warns(UserWarning, match=r"Sequential keeps no running statistics in 2: its scores for a sample "):
            module = LitClassifier(normalised(0), optimizer=partial(SGD, lr=0.1))
        runner = trainer(**on(place), precision="64-true")
        runner.fit(module, data)
        scores = dict(runner.callback_metrics)
        runner.test(module, data, verbose=False)
        scores |= runner.callback_metrics
        values.append(weights(module) | {name: torch.as_tensor(value) for name, value in scores.items()})
    assert_same(*values, atol=0.0 if exact else 1e-9)
