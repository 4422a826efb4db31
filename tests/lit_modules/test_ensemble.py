"""An ensemble is the mean of its members' probabilities, and a teacher that is not trained."""

import json
from pathlib import Path

import pytest
import torch

from apprentice.errors import BadInput
from experiments import kd
from harness.runs.nets import load_net, save_net, spec
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Ensemble, LightNN, Outputs, check_fits
from lit_modules.objectives import TTM, CrossEntropy, Hinton, Objective, Term
from lit_modules.objectives.cross_entropy import ce_term
from tests.training import SHAPE, assert_same, digits, fit, net, on, weights


def test_logits_are_those_of_the_mean_of_probabilities() -> None:
    members = [net(seed=seed).double().eval() for seed in range(3)]
    images = torch.rand(4, *SHAPE, dtype=torch.float64)
    expected = sum(member(images).softmax(1) for member in members) / 3
    torch.testing.assert_close(Ensemble(members)(images).exp(), expected, rtol=1e-12, atol=0)


class OfMembers(Objective):
    def forward(self, student: Outputs, teacher: Outputs | None, labels: torch.Tensor) -> dict[str, Term]:
        assert teacher is not None
        soft = (teacher.features["members"] / 2).softmax(-1).mean(1)
        return {"kd": Term(-(soft * student.logits.log_softmax(1)).sum(1), 1.0), "ce": ce_term(student, labels, 1.0)}


@pytest.mark.parametrize("cache", [0, 64])
def test_objectives_get_the_members_logits(cache: int) -> None:
    members = [net(DeepNN, seed=1), net(seed=2)]
    module = Distillation(
        Ensemble(members), {"a": (net(), OfMembers()), "kd": (net(), Hinton())}, SHAPE, teacher_cache_mb=cache
    )
    images = torch.rand(3, *SHAPE)
    found = module.train()(images)[0].features["members"]
    torch.testing.assert_close(found, torch.stack([member(images) for member in members], 1), rtol=0, atol=1e-6)
    before = weights(module.teacher)
    data = digits()
    assert_same(weights(fit(module, data)), weights(module))
    assert_same(before, weights(module.teacher))


def test_one_member_teaches_as_it_does_alone() -> None:
    teachers = net(DeepNN, seed=1), Ensemble([net(DeepNN, seed=1)])
    made = [
        Distillation(teacher, {"ce": (net(), CrossEntropy()), "kd": (net(), Hinton())}, SHAPE) for teacher in teachers
    ]
    for module in made:
        fit(module.double(), digits(), precision="64-true")
    assert_same(*map(weights, made), atol=1e-9)


def test_two_processes_compute_what_one_does() -> None:
    def taught(place: str) -> dict[str, torch.Tensor]:
        teacher = Ensemble([net(DeepNN, seed=1), net(seed=2)])
        module = Distillation(teacher, {"kd": (net(), Hinton()), "each": (net(), TTM())}, SHAPE)
        return weights(fit(module, digits(), precision="64-true", **on(place)))

    assert_same(taught("auto 1"), taught("fsdp 2"), atol=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_members_that_differ_in_classes_or_none_are_refused() -> None:
    ensemble = Ensemble([net(), net(num_classes=7)])
    with pytest.raises(BadInput, match=r"^teacher\.members \[10, 7\]: expected nets of the same classes"):
        check_fits(ensemble, torch.rand(2, *SHAPE), (10,), "teacher", trained=False)
    with pytest.raises(BadInput, match=r"^members \[\]: expected one trained net or more"):
        Ensemble([])


def test_from_folders_it_is_tested_exported_and_not_trained(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    members = [net(LightNN, seed=seed) for seed in (1, 2)]
    for folder, member in zip(folders, members, strict=True):
        save_net(member, spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), folder)
    out = tmp_path / "out"
    kd.main([
        "--teacher", "Ensemble", "--teacher.members", json.dumps([*map(str, folders)]), "--only", "ce", "kd",
        "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "40", "--out", str(out),
    ])  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    assert results["teacher"]["nets"] == 1
    assert results["teacher"]["fit_seconds"] == [None]
    images = torch.rand(3, *SHAPE)
    kept = load_net(out / "seed0" / "teacher")
    assert torch.equal(kept(images), Ensemble([load_net(folder) for folder in folders])(images))
