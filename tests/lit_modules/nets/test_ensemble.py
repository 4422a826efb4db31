"""Teachers of several members, students that take over a classifier, and students that learn from one another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from experiments import kd
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Ensemble, LightNN, Outputs, ResNet, ViT, check_fits, run
from lit_modules.nets.classes import check_classes
from lit_modules.nets.reused import ReusedClassifier
from lit_modules.objectives import DML, TTM, CrossEntropy, Hinton, Objective, SimKD, Sum, Term
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.cross_entropy import ce_term
from tests.commands import Refusal, bad_input
from tests.formulas import assert_equal
from tests.net_facts import facts
from tests.training import SHAPE, assert_same, digits, distil, fit, net, on, weights


def test_logits_are_those_of_the_mean_of_probabilities() -> None:
    members = [net(seed=seed).double().eval() for seed in range(3)]
    images = torch.rand(4, *SHAPE, dtype=torch.float64)
    expected = sum(member(images).softmax(1) for member in members) / 3
    torch.testing.assert_close(Ensemble(members)(images).exp(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_weighted_means_and_their_temperature(average: Any) -> None:
    shares, images = [0.6, 0.3, 0.1], torch.rand(4, *SHAPE, dtype=torch.float64)
    members = [net(seed=seed).double().eval() for seed in range(3)]
    z = [member(images) for member in members]
    ensemble = Ensemble(members, [6, 3, 1], average)

    def mean(t: float) -> torch.Tensor:
        if average == "logits":
            return (sum(w * x for w, x in zip(shares, z, strict=True)) / t).softmax(1)
        return sum(w * (x / t).softmax(1) for w, x in zip(shares, z, strict=True))

    torch.testing.assert_close(ensemble(images).softmax(1), mean(1.0), rtol=1e-12, atol=0)
    teacher = run(ensemble, images, set(ensemble.member_layers))
    logits = torch.rand(4, 10, dtype=torch.float64, requires_grad=True)
    q = (logits / 4).softmax(1)
    expected = 16 * (mean(4.0) * (mean(4.0) / q).log()).sum(1)
    ours = Hinton(temperature=4.0)(Outputs(logits, {}), teacher, torch.zeros(4, dtype=torch.int64))["kd"].values
    assert_equal(ours, expected, logits, rtol=1e-9, atol=1e-13, loss={"rtol": 1e-9, "atol": 1e-12})


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_equal_weights_are_none_and_places_and_a_cache_change_nothing(average: Any) -> None:
    def ended(shares: list[float] | None, place: str = "auto 1", cache: int = 0) -> dict[str, torch.Tensor]:
        return _taught_by(Ensemble([net(DeepNN, seed=1), net(seed=2)], shares, average), place, cache)

    first = ended(None)
    for other in (ended([2.0, 2.0]), ended([3, 3], "ddp 2"), ended([1, 1], cache=64)):
        assert_same(first, other, atol=1e-9)
    assert_same(ended([1, 1e-15]), _taught_by(net(DeepNN, seed=1)), atol=1e-9)


def _taught_by(teacher: nn.Module, place: str = "auto 1", cache: int = 0) -> dict[str, torch.Tensor]:
    module = distil({"kd": Hinton(), "each": TTM()}, teacher, teacher_cache_mb=cache)
    return weights(fit(module, digits(), precision="64-true", **on(place)))


class OfMembers(Objective):
    def forward(self, student: Outputs, teacher: Outputs | None, labels: torch.Tensor) -> dict[str, Term]:
        assert teacher is not None
        soft = (teacher.features["members"] / 2).softmax(-1).mean(1)
        return {"kd": Term(-(soft * student.logits.log_softmax(1)).sum(1), 1.0), "ce": ce_term(student, labels, 1.0)}


@pytest.mark.parametrize("cache", [0, 64])
def test_objectives_get_the_members_logits(cache: int) -> None:
    members = [net(DeepNN, seed=1), net(seed=2)]
    module = distil({"a": OfMembers(), "kd": Hinton()}, Ensemble(members), teacher_cache_mb=cache)
    images = torch.rand(3, *SHAPE)
    found = module.train()(images)[0].features["members"]
    torch.testing.assert_close(found, torch.stack([member(images) for member in members], 1), rtol=0, atol=1e-6)
    before = weights(module.teacher)
    data = digits()
    assert_same(weights(fit(module, data)), weights(module))
    assert_same(before, weights(module.teacher))


def test_one_member_teaches_as_it_does_alone() -> None:
    teachers = net(DeepNN, seed=1), Ensemble([net(DeepNN, seed=1)])
    made = [distil({"ce": CrossEntropy(), "kd": Hinton()}, teacher) for teacher in teachers]
    for module in made:
        fit(module.double(), digits(), precision="64-true")
    assert_same(*map(weights, made), atol=1e-9)


def test_two_processes_compute_what_one_does() -> None:
    def ended(place: str) -> dict[str, torch.Tensor]:
        teacher = Ensemble([net(DeepNN, seed=1), net(seed=2)])
        module = distil({"kd": Hinton(), "each": TTM()}, teacher)
        return weights(fit(module, digits(), precision="64-true", **on(place)))

    assert_same(ended("auto 1"), ended("fsdp 2"), atol=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_members_that_differ_in_classes_or_none_are_refused() -> None:
    ensemble = Ensemble([net(), net(num_classes=7)])
    with pytest.raises(BadInput, match=r"^teacher\.members \[10, 7\]: expected nets of the same classes"):
        check_fits(ensemble, torch.rand(2, *SHAPE), (10,), "teacher", trained=False)
    with pytest.raises(BadInput, match=r"^members \[\]: expected one trained net or more"):
        Ensemble([])


def test_members_of_other_images_or_weights_without_a_member_are_refused() -> None:
    first, second = net(), net()
    first.expects, second.expects = {"mean": (0.5,)}, {"mean": (0.1,)}
    assert Ensemble([first, net()]).expects == {"mean": (0.5,)}
    expected = "nets whose weights expect one mean; another has (0.5,)"
    assert bad_input(Ensemble, [first, second]) == f"members (0.1,): expected {expected}"
    for values in ([1.0], [1.0, 0.0], [1.0, float("inf")]):
        line = bad_input(Ensemble, [net(), net()], values)
        assert line == f"weights {values}: expected as many numbers above 0 as members, 2"


def test_trained_weights_of_other_means_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    folder = tmp_path / "net"
    save_net(net(), spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), folder, facts())  # of a mean of 0.3
    short = ["--data", "Digits", "--only", "kd", "--out", tmp_path / "run"]
    for key, flags in {
        "teacher": ["--teacher", "Ensemble", "--teacher.members", json.dumps([str(folder)])],
        "teacher_ckpt": ["--teacher", "LightNN", "--teacher_ckpt", folder / "weights.pt"],
    }.items():
        line = refusal(kd.main, *short, *flags)
        assert line.startswith("--data.mean ")
        assert line.endswith(f"expected [0.3], with which the weights of --{key} were trained")


def test_members_in_two_orders_of_classes_are_refused_without_the_data_s_too() -> None:
    names = [f"digit {number}" for number in range(10)]
    members = [net(), net(seed=1)]
    members[0].class_names, members[1].class_names = tuple(names), tuple(reversed(names))
    expected = "teacher Ensemble: expected a net with {} order of classes (digit 0;"
    line = bad_input(check_classes, Ensemble([Ensemble(members[:1]), members[1]]), (), "teacher")
    assert line.startswith(expected.format("its first member's"))
    assert bad_input(check_classes, Ensemble(members), names, "teacher").startswith(expected.format("the data's"))


@pytest.mark.parametrize(
    ("member", "line"),
    [
        ("none", "none: expected a net's folder, as RUN/seed0/kd, with weights.pt and net.yaml"),
        (3, "3: expected the folder of a trained net, as RUN/seed0/kd"),
        ({"class_path": "ResNet"}, "{'class_path': 'ResNet'}: expected the folder of a trained net, as RUN/seed0/kd"),
    ],
)
def test_wrong_members_are_refused_in_one_line(member: Any, line: str, refusal: Callable[..., str]) -> None:
    found = refusal(kd.main, "--teacher", "Ensemble", "--teacher.members", json.dumps([member]))
    assert found.removeprefix("--teacher.members.0").removeprefix(" ").startswith(line)


def test_from_folders_it_is_tested_exported_and_not_trained(tmp_path: Path) -> None:
    """The second member is an ensemble itself."""
    folders, saved = [tmp_path / name for name in ("first", "second")], "lit_modules.nets.LightNN"
    save_net(net(LightNN, seed=1), spec(saved, {"input_shape": SHAPE}), folders[0])
    inner = {"members": [spec(saved, {"input_shape": SHAPE})]}
    save_net(Ensemble([net(LightNN, seed=2)]), spec("lit_modules.nets.Ensemble", inner), folders[1])
    out = tmp_path / "out"
    kd.main([
        "--teacher", "Ensemble", "--teacher.members", json.dumps([*map(str, folders)]), "--teacher.weights", "[2,1]",
        "--only", "ce", "kd", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "40", "--out", str(out),
    ])  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    assert results["teacher"]["nets"] == 1
    assert results["teacher"]["fit_seconds"] == [None]
    images = torch.rand(3, *SHAPE)
    kept = load_net(out / "seed0" / "teacher")
    assert torch.equal(kept(images), Ensemble([load_net(folder) for folder in folders], [2, 1])(images))
    kd.main(["--out", str(out), "--resume", "true"])


def module(student: type[nn.Module] = LightNN, teacher: type[nn.Module] = DeepNN, **options: Any) -> Distillation:
    made: dict[str, tuple[nn.Module, Objective]] = {"simkd": (net(student, **options), SimKD())}
    return Distillation(net(teacher, seed=1), made | {"ce": (net(), CrossEntropy())}, input_shape=SHAPE)


@pytest.fixture(scope="module")
def fitted() -> Distillation:
    return fit(module(), digits())


def test_the_loss_is_the_maps_and_trains_all_but_the_classifier() -> None:
    made = module().double().train()
    student, images = made.students["simkd"], torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0)).double()
    f_t = made.teacher.features(images)
    terms = student.objective(student(images), Outputs(torch.zeros(3, 10), {"default": f_t}), torch.zeros(3))
    f_s = student.net.projector(student.net.body(images))
    expected = torch.stack([(a - b).flatten().pow(2).sum() / a.numel() for a, b in zip(f_s, f_t, strict=True)])
    assert [*terms] == ["maps"]
    torch.testing.assert_close(terms["maps"].values, expected, rtol=1e-12, atol=0)
    expected.sum().backward()
    trained = {key for key, p in student.net.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {key for key, p in student.net.named_parameters() if not key.startswith("classifier.")}
    assert not student.net.classifier.training


def test_it_predicts_by_the_teachers_classifier_which_training_does_not_change(fitted: Distillation) -> None:
    student, images = fitted.students["simkd"].net.eval(), torch.rand(4, *SHAPE)
    maps = student.projector(student.body(images))
    assert torch.equal(student(images), fitted.teacher.classifier(maps.flatten(1)))
    assert_same(weights(fitted), weights(fit(module(), digits())))


def test_the_export_loads_and_predicts_by_itself(fitted: Distillation, tmp_path: Path) -> None:
    own = {"student": LightNN, "teacher": DeepNN}
    nested = {k: spec(f"lit_modules.nets.{made.__name__}", {"input_shape": SHAPE}) for k, made in own.items()}
    student = fitted.students["simkd"].net.eval().to(memory_format=torch.contiguous_format)
    save_net(student, spec("lit_modules.nets.reused.ReusedClassifier", {**nested, "input_shape": SHAPE}), tmp_path)
    images = torch.rand(5, *SHAPE)
    found = load_net(tmp_path)
    assert isinstance(found, ReusedClassifier)
    assert torch.equal(found(images), student(images))


@pytest.mark.slow
def test_exact_is_bitwise_in_a_pipeline_too() -> None:
    places = "ddp 1 exact 4", "ddp 2 exact 4", "pipeline 2 exact 4"
    first, *others = (weights(fit(module(), digits(), **on(place))) for place in places)
    for ended in others:
        assert_same(first, ended)


@pytest.mark.parametrize(("student", "teacher"), [(ResNet, DeepNN), (LightNN, ResNet), (ResNet, ResNet)])
def test_nets_of_maps_fit_one_another(student: type[nn.Module], teacher: type[nn.Module]) -> None:
    made = module(student, teacher)
    student_net, images = made.students["simkd"].net, torch.rand(2, *SHAPE)
    teacher_net = made.teacher
    classify: Any = teacher_net.head if teacher is ResNet else teacher_net.classifier
    maps = student_net.eval().projector(student_net.body(images))
    pooled = maps.mean((2, 3)) if teacher is ResNet else maps.flatten(1)
    assert torch.equal(student_net(images), classify(pooled))


class Pooled(nn.Module):
    feature_layer = "parts.1"

    def __init__(self, size: int) -> None:
        super().__init__()
        maps = nn.AdaptiveAvgPool2d(size), nn.Conv2d(1, 4, 1)
        self.parts = nn.Sequential(*maps, nn.Flatten(), nn.Linear(4 * size**2, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.parts(images)

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.parts]


@pytest.mark.parametrize(("size", "shared"), [(1, 1), (2, 2), (4, 2)])
def test_larger_maps_are_pooled(size: int, shared: int) -> None:
    made = Distillation(net(ResNet, depth=8), {"a": (Pooled(size), SimKD())}, input_shape=SHAPE)
    outputs = made.students["a"](torch.rand(2, *SHAPE))
    assert outputs.features["default"].shape == (2, 64, shared, shared)
    assert outputs.logits.shape == (2, 10)


@pytest.mark.parametrize(
    ("student", "teacher", "objective", "message"),
    [
        (lambda: net(ViT), net, SimKD, r"variants\.a SimKD: expected as student a net whose .* it is ViT$"),
        (net, lambda: net(ViT), SimKD, r"variants\.a SimKD: expected as teacher a net whose .* it is ViT$"),
        (lambda: Pooled(1), net, SimKD, r"variants\.a SimKD: expected as teacher one whose classifier takes"),
        (net, net, lambda: Sum([SimKD(), SimKD()]), r"variants\.a\.objectives 2: expected at most one"),
    ],
)
def test_refused(student: Any, teacher: Any, objective: Callable[[], Objective], message: str) -> None:
    with pytest.raises(BadInput, match=f"^{message}"):
        Distillation(teacher(), {"a": (student(), objective())}, input_shape=SHAPE)


def test_in_a_sum_other_parts_see_the_new_net() -> None:
    made = distil({"a": Sum([Hinton(), SimKD()])})
    assert isinstance(made.students["a"].net, ReusedClassifier)


COHORT = {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}


def cohort(*others: str, **peers: list[str]) -> Distillation:
    made: dict[str, tuple[torch.nn.Module, Objective]] = {name: (net(), CrossEntropy()) for name in others}
    named = peers or COHORT
    made |= {name: (net(seed=i), DML(learns_from)) for i, (name, learns_from) in enumerate(named.items(), 1)}
    return Distillation(net(DeepNN, seed=1), made, input_shape=SHAPE)


def test_the_paper_s_formula() -> None:
    g = torch.Generator().manual_seed(0)
    z, *others = (torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(3))
    z.requires_grad_()
    objective, labels = DML(["a", "b"], mutual_weight=2.0), torch.tensor([0, 2, 1, 1])
    context = StepContext(peers={name: Outputs(x, {}) for name, x in zip("ab", others, strict=True)})
    terms = objective(Outputs(z, {}), None, labels, context)
    q = z.softmax(1)
    expected = sum((p * (p / q).log()).sum(1) for p in (x.softmax(1) for x in others)) / 2
    torch.testing.assert_close(terms["ce"].values, F.cross_entropy(z, labels, reduction="none"))
    assert [term.weight for term in terms.values()] == [2.0, 1.0]
    assert_equal(terms["mutual"].values, expected, z, rtol=1e-10, atol=1e-14, loss={"rtol": 1e-12, "atol": 1e-14})


def test_a_cohort_of_three_is_the_same_on_any_number_of_processes() -> None:  # of two: tests/harness/test_zoo.py
    one, three = (weights(fit(cohort("ce"), digits(), n, precision="64-true")) for n in (1, 3))
    assert_same(one, three, atol=1e-9)
    first = [one[f"students.{name}.net.features.0.weight"].sum().item() for name in COHORT]
    assert len({*first}) == 3


class Watching(DML):
    def forward(self, student: Any, teacher: Any, labels: Any, context: StepContext = NO_STEP) -> Any:
        assert not any(peer.logits.requires_grad for peer in context.peers.values())
        return super().forward(student, teacher, labels, context)


class FailsAt(CrossEntropy):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, student: Any, teacher: Any, labels: Any, context: StepContext = NO_STEP) -> Any:
        ce = super().forward(student, teacher, labels)["ce"]
        return {"ce": ce._replace(values=ce.values / (context.step != self.step))}


def test_those_who_learn_from_one_that_fails_fail_with_it(capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    made: dict[str, tuple[torch.nn.Module, Objective]] = {
        "bad": (net(), FailsAt(2)), "a": (net(seed=1), DML(["bad"])), "b": (net(seed=2), Sum([Watching(["a"])])),
        "ce": (net(), CrossEntropy()), "read": (net(seed=3), Hinton()),
    }  # fmt: skip
    made["bad"][1].peers = ["read"]
    kept = fit(Distillation(net(DeepNN, seed=1), made, input_shape=SHAPE), digits())
    assert kept.failed == {
        "bad": {"step": 2, "term": "ce"}, "a": {"step": 2, "term": "peer bad"}, "b": {"step": 2, "term": "peer a"},
    }  # fmt: skip
    assert "a failed at step 2: its peer bad is not finite" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        ({"a": ["q"], "b": ["a"]}, r"variants\.a\.peers q: expected students trained beside it: b"),
        ({"a": ["a"]}, r"variants\.a\.peers a: expected students trained beside it: there are none"),
        ({"a": []}, r"peers \[\]: expected names of one student or more"),
        ({"a": ["b", "b"]}, r"peers \['b', 'b'\]: expected names of one student or more, each once"),
    ],
)
def test_peers_that_are_not_there_are_refused(peers: dict[str, list[str]], message: str) -> None:
    with pytest.raises(BadInput, match=f"^{message}"):
        cohort(**peers)
