"""All methods of images that the package exports, in one pass: each ends with the bits that it has alone."""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apprentice.errors import BadInput
from harness.cli.signatures import options_of
from harness.studies import zoo
from lab.strategies import DDPRing
from lit_modules import objectives
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, ResNet, ViT
from lit_modules.objectives import Hint, Hinton, Objective
from lit_modules.training.teacher import describe_sizes
from strategies import DDP, FSDP, ZeRO1
from tests.grids import mostly_slow
from tests.language import OF_TEXTS, OF_VITS
from tests.training import SHAPE, assert_same, digits, distillation, fit, net, weights

TEACHER: Callable[[], nn.Module] = partial(net, ResNet, seed=1, depth=14)
STUDENTS: dict[str, Callable[..., nn.Module]] = {  # a method learns by the first that it fits
    "light": net,
    "res": partial(net, ResNet, depth=8),
    "vit": partial(net, ViT, distillation_token=True),
}
NEEDS = zoo.needs()
METHODS = sorted(NEEDS.keys() - OF_TEXTS - OF_VITS)


def members(method: str) -> dict[str, Objective]:
    """The students that train together: one, or two that are peers."""
    made = getattr(objectives, method)
    if not NEEDS[method]:
        return {method: made()}
    assert NEEDS[method] == ["peers"], "a method that needs something else: say here how it is made"
    return {method: made(peers=[f"{method}-2"]), f"{method}-2": made(peers=[method])}


def distilled(students: Mapping[str, tuple[nn.Module, Objective]], **options: Any) -> Distillation:
    return Distillation(TEACHER(), students, input_shape=SHAPE, samples=76, **options)


@cache
def fitting(method: str) -> str:
    """The student that a method fits."""
    for student, make in STUDENTS.items():
        try:
            distilled({name: (make(), objective) for name, objective in members(method).items()})
        except BadInput:
            continue
        return student
    raise AssertionError(f"{method} fits none of {', '.join(STUDENTS)}")


def module(*methods: str, **options: Any) -> Distillation:
    students = {
        name: (STUDENTS[fitting(method)](seed=number), objective)  # peers that begin alike would stay so
        for method in methods or METHODS
        for number, (name, objective) in enumerate(members(method).items())
    }
    return distilled(students, **options)


def of(method: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: x for key, x in state.items() if key.split(".")[1] in members(method)}


DOUBLE = "64-true"
HOW: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "1": (1, dict),
    "2": (2, dict),
    "float64": (1, lambda: {"precision": DOUBLE}),
    "exact on 1": (1, lambda: {"strategy": DDP(timeout=120, exact=4)}),
    "exact on 3": (3, lambda: {"strategy": DDP(timeout=120, exact=4)}),
}


@cache
def together(how: str) -> dict[str, torch.Tensor]:
    devices, options = HOW[how]
    return weights(fit(module(), digits(train_size=76), devices, **options()))


ALONE = {"1": ["1"], "2": ["2"], "exact on 1": ["exact on 1", "exact on 3"]}  # how alone, and how in company


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", mostly_slow(ALONE, "1"))
def test_alone_as_in_company(how: str, method: str) -> None:
    devices, options = HOW[how]
    alone = weights(fit(module(method), digits(train_size=76), devices, **options()))
    assert alone
    for company in ALONE[how]:
        assert_same(alone, of(method, together(company)))


STRATEGIES: dict[str, Callable[..., Any]] = {"ddp": DDP, "zero1": ZeRO1, "fsdp": FSDP, "ring": DDPRing}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_compute_what_one_does_by_any_method(strategy: str) -> None:
    options = {"strategy": STRATEGIES[strategy](timeout=120), "precision": DOUBLE}
    assert_same(weights(fit(module(), digits(train_size=76), 2, **options)), together("float64"), atol=1e-9)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "SimKD"])  # it cuts the nets itself
def test_the_layers_of_a_method_are_its_options(method: str) -> None:
    objective = module(method).students[method].objective
    known = options_of(type(objective)).defaults
    layers = {**objective.student_layers, **objective.teacher_layers}
    assert {option.partition(".")[0] for option in layers} <= {*known}


@pytest.mark.parametrize("cached", [False, True])
def test_the_teacher_runs_once_a_batch_or_once_in_all(cached: bool) -> None:
    calls: list[int] = []
    kept = module(teacher_cache_mb=1024 * cached)
    kept.teacher.register_forward_hook(lambda *_: calls.append(1))
    data = digits(train_size=76)
    fit(kept, data)
    in_order = len(list(data.train_in_order(0, 1)))
    assert len(calls) == (in_order if cached else 2 * len(data.train_dataloader()))


def test_what_the_teachers_outputs_take_is_told_by_student(capsys: pytest.CaptureFixture[str]) -> None:
    students = {"kd": Hinton(), "hint": Hint(), "again": Hint(), "pkt": objectives.PKT()}
    kept = Distillation(net(DeepNN, seed=1), {name: (net(), o) for name, o in students.items()}, input_shape=SHAPE)
    fit(kept, digits(train_size=1400, batch_size=700))
    # 128 numbers of 4 bytes for each feature, 10 logits, 1400 samples
    assert "teacher's outputs stored: 1.4 MiB; 0.7 for hint, again; 0.7 for pkt\n" in capsys.readouterr().out
    kept.cache.max_bytes = 2**20
    fit(kept, digits(train_size=1400, batch_size=700))
    assert "teacher's outputs are not stored: they take more than 1 MiB\n" in capsys.readouterr().out
    fit(distillation(), digits())
    assert not capsys.readouterr().out
    fit(distillation(teacher_cache_mb=0), digits())
    assert not capsys.readouterr().out


def test_a_condensed_feature_belongs_to_its_student() -> None:
    class Half(Hint):
        def build(self, student: Any, teacher: Any) -> None:
            super().build(student, self.condense(teacher))

        def condense(self, teacher: Any) -> Any:
            return teacher._replace(features={path: x[:, ::2] for path, x in teacher.features.items()})

    students = {"whole": (net(), Hint()), "halved": (net(), Half())}
    kept = Distillation(net(DeepNN, seed=1), students, input_shape=SHAPE)
    stored = kept.ask_teacher(torch.zeros(4096, *SHAPE))
    assert describe_sizes(stored, kept.objectives) == "3.2 MiB; 2.0 for whole; 1.0 for halved"


def test_methods_are_those_with_defaults_by_their_names() -> None:
    found = zoo.methods({"ce": "CrossEntropy", "kd": "Hinton"})
    assert {"ce": "CrossEntropy", "kd": "Hinton", "rkd": "RKD", "hint": "Hint"}.items() <= found.items()
    assert not {"sum", "objective", "featureobjective", "embeddingobjective"} & found.keys()


def test_the_diagram_has_every_method_and_tells_what_relates_samples() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
    (diagram,) = re.findall(r"^```mermaid\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    boxes = re.findall(r'\["<b>(.*?)</b><br>(.*)"\]', diagram)
    kinds = {name: kind for kind, names in boxes for name in re.findall(r"\w+", names)}
    assert NEEDS.keys() <= kinds.keys()
    related = {method for method in METHODS if members(method)[method].relates_rows}
    assert {method for method, kind in kinds.items() if "relations" in kind} == related
