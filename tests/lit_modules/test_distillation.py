"""A bake-off is honest: students don't disturb each other, and nothing but students learns."""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from apprentice.batch import Batch
from apprentice.errors import BadInput
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN, Outputs, ResNet
from lit_modules.objectives import RKD, Cosine, CrossEntropy, Hint, Hinton, Objective, Sum, Term
from lit_modules.objectives.cross_entropy import ce_term
from tests.grids import mostly_slow
from tests.training import (
    SHAPE,
    VARIANTS,
    LinesLogger,
    assert_same,
    digits,
    distil,
    distillation,
    fit,
    net,
    trainer,
    weights,
)


def student_weights(module: Distillation, name: str) -> dict[str, torch.Tensor]:
    return weights(module.students[name])


@pytest.fixture(scope="module")
def company() -> Distillation:
    return fit(distillation([*VARIANTS, "kd2"]), digits(), gradient_clip_val=0.5)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, "hint"))  # unclipped: tests/harness/test_zoo.py
def test_alone_and_in_company_a_student_ends_with_the_same_bits(name: str, company: Distillation) -> None:
    alone = fit(distillation([name]), digits(), gradient_clip_val=0.5)
    assert_same(student_weights(alone, name), student_weights(company, name))


def test_equal_settings_end_bitwise_equal_and_others_do_not(company: Distillation) -> None:
    assert_same(student_weights(company, "kd"), student_weights(company, "kd2"))
    kd, ce = (company.students[name].net.classifier[0].weight for name in ("kd", "ce"))
    assert not torch.equal(kd, ce)


def test_clipping_is_each_students_own() -> None:
    unclipped = fit(distillation(["ce"]), digits())
    clipped = fit(distillation(["ce"]), digits(), gradient_clip_val=1e-4)
    with pytest.raises(AssertionError):
        assert_same(weights(unclipped), weights(clipped))


class Watch(Callback):
    def __init__(self) -> None:
        self.modes: list[tuple[bool, bool]] = []
        self.teacher_gradients = 0
        self.optimized: set[int] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert isinstance(pl_module, Distillation)
        teacher = any(m.training for m in pl_module.teacher.modules())
        students = all(m.training for m in pl_module.students.modules())
        self.modes.append((teacher, students))
        self.teacher_gradients += sum(p.grad is not None for p in pl_module.teacher.parameters())
        self.optimized |= {id(p) for g in optimizer.param_groups for p in g["params"]}


def test_the_teacher_only_watches(tmp_path: Path) -> None:
    teacher = net(ResNet, depth=8)
    before = weights(teacher)
    module = Distillation(teacher, {"hint": (net(ResNet, depth=8), Hint())}, input_shape=SHAPE)
    watch = Watch()
    run = trainer(callbacks=[watch], max_epochs=3)
    from harness.runs.quiet import quiet

    with quiet():
        run.fit(module, digits(validation_size=30))
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert_same(before, weights(teacher))  # BatchNorm's statistics included
    assert watch.modes == [(False, True)] * 9  # in every epoch, after validation too
    assert watch.teacher_gradients == 0
    assert not watch.optimized & {id(p) for p in teacher.parameters()}
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"]
    assert not [key for key in saved["state_dict"] if key.startswith("teacher")]
    assert len(saved["optimizer_states"][0]["state"]) == len(list(module.students.parameters()))


def test_a_checkpoint_without_the_teacher_loads_strictly_and_still_checks_the_students() -> None:
    module = distillation(["kd"])
    module.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match=r"students\.kd"):
        module.load_state_dict({})


def test_an_exported_student_is_the_bare_net(tmp_path: Path, company: Distillation) -> None:
    student = company.students["hint"].net
    save_net(student, spec("lit_modules.nets.LightNN", {"input_shape": SHAPE}), tmp_path)
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    bare = LightNN(SHAPE)
    bare.load_state_dict(state)  # strict: no prefix, no regressor
    x = torch.randn(3, *SHAPE)
    assert torch.equal(load_net(tmp_path)(x), bare.eval()(x))
    torch.testing.assert_close(bare(x), student.eval()(x))


class Poisoned(Objective):
    """Cross-entropy until a step, then not a number."""

    uses_teacher = False

    def __init__(self, after: int) -> None:
        super().__init__()
        self.calls, self.after = 0, after

    def forward(self, student: Any, teacher: Any, labels: torch.Tensor) -> dict[str, Term]:
        self.calls += 1
        terms = CrossEntropy()(student, teacher, labels)
        poison = float("nan") if self.calls > self.after else 1.0
        return {"fine": terms["ce"], "poisoned": Term(terms["ce"].values * poison, 1.0)}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_student_that_fails_is_frozen_and_the_others_finish(devices: int, tmp_path: Path) -> None:
    module = distil({"bad": Poisoned(4), "ce": CrossEntropy()})
    logger = LinesLogger(tmp_path / "log")
    fit(module, digits(), devices, max_epochs=4, logger=logger, log_every_n_steps=1)
    assert len(set(logger.values("bad/train/loss"))) == 4  # Lightning repeats a last value to the end of its epoch
    assert len(logger.values("ce/train/loss")) == 12
    stopped = distil({"bad": Poisoned(100)})
    fit(stopped, digits(), devices, max_epochs=-1, max_steps=4)
    assert_same(student_weights(module, "bad"), student_weights(stopped, "bad"))
    alone = fit(distillation(["ce"]), digits(), devices, max_epochs=4)
    assert_same(student_weights(module, "ce"), student_weights(alone, "ce"))
    if devices == 1:
        assert module.failed == {"bad": {"step": 4, "term": "poisoned"}}


def test_teacher_outputs_stored_once_change_no_weight() -> None:
    def run(augment: bool = False, **memory: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
        module, asked = distillation(**memory), []
        module.teacher.register_forward_hook(lambda _net, images, _logits: asked.append(len(images[0])))
        return weights(fit(module, digits(augment=augment), max_epochs=4, precision="64-true")), asked

    (stored, once), (online, always) = run(), run(teacher_cache_mb=0)
    assert (once, always) == ([37, 37, 27], [37, 37, 27] * 4)
    assert_same(stored, online, atol=1e-9)
    assert run(augment=True)[1] == always  # views differ: nothing is stored


def test_teacher_outputs_beyond_their_memory_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    module, filled = distillation(["kd"]), []
    monkeypatch.setattr(Distillation, "on_train_end", lambda self: filled.append(self.cache.outputs is not None))
    for samples in (100, 101):  # there are 101, of ten float32 logits each
        module.cache.max_bytes = samples * 10 * 4
        fit(module, digits())
    assert filled == [False, True]


def test_several_objectives_of_one_kind_live_side_by_side() -> None:
    both = Sum([Hinton(temperature=2.0), Hinton(temperature=8.0), Cosine()], weights=[1.0, 1.0, 0.5])
    module = Distillation(net(DeepNN), {"both": (net(), both), "t8": (net(), Hinton(8.0))}, input_shape=SHAPE)
    before = student_weights(module, "both")
    fit(module, digits())
    with pytest.raises(AssertionError):
        assert_same(before, student_weights(module, "both"))


def test_noise_that_is_not_keyed_is_named_once() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10), nn.Dropout(0.0))
    with pytest.warns(UserWarning, match=r"Sequential draws noise from torch's generator in 1: ") as found:
        Distillation(net(DeepNN), {"ce": (plain, CrossEntropy())}, input_shape=SHAPE)
    assert len(found) == 1


@pytest.mark.parametrize("name", ["items", "type", "a.b"])
def test_a_name_that_torch_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"variants {name}: expected a name"):
        distil({name: CrossEntropy()})


def test_a_refused_pair_names_the_variants_flag() -> None:
    teacher: nn.Module = net(DeepNN)
    with pytest.raises(BadInput, match=r"variants\.h\.student_layer features\.0: .*\(16, 8, 8\).*\(32, 2, 2\)"):
        distil({"h": Hint(student_layer="features.0")}, teacher)
    with pytest.raises(BadInput, match=r"conv7"):
        distil({"h": Hint(teacher_layer="conv7")}, teacher)


class Formula(Objective):
    def __init__(self, formula: Callable[[Outputs, Outputs, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, student: Outputs, teacher: Outputs | None, labels: torch.Tensor) -> dict[str, Term]:
        assert teacher is not None
        return {"x": Term(self.formula(student, teacher, labels), 1.0)}


def entropies(s: Outputs, _t: Outputs, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(s.logits, y, reduction="none")


@pytest.mark.parametrize(
    ("formula", "given"),
    [
        (lambda s, t, y: F.cross_entropy(s.logits, y), r"\(\)"),
        (lambda s, t, y: entropies(s, t, y)[:, None], r"\(3, 1\)"),
        (lambda s, t, y: (s.logits - t.logits).square().mean(0), r"\(10,\)"),
        (lambda s, t, y: entropies(s, t, y).mean().item(), "a float"),
    ],
)
def test_a_term_has_a_value_for_each_row(formula: Any, given: str) -> None:
    wrong = Sum([CrossEntropy(), Formula(formula)])
    with pytest.raises(BadInput, match=rf"^variants\.a Sum: .* term 1\.x has a value a row, \(3,\); it gives {given}$"):
        distil({"a": wrong})


RELATING: dict[str, Callable[[Outputs, Outputs, torch.Tensor], torch.Tensor]] = {
    "statistics": lambda s, t, y: (s.logits / s.logits.std(0)).sum(1),
    "a neighbour": lambda s, t, y: (s.logits - s.logits.roll(1, 0)).square().sum(1),
    "those before": lambda s, t, y: s.logits.cumsum(0).sum(1),
    "the teacher's": lambda s, t, y: entropies(s, t, y) * (t.logits @ t.logits.T).sum(1),
    "labels": lambda s, t, y: entropies(s, t, y) / (y[:, None] == y).sum(1),
    "confidence": lambda s, t, y: entropies(s, t, y) * (s.logits.softmax(1).amax(1) > 0.9).sum(),
}


@pytest.mark.parametrize("name", RELATING)
def test_what_relates_rows_says_so(name: str) -> None:
    def made() -> Objective:
        return Formula(RELATING[name])

    told = r"^variants\.a \w+: .* x has a value a row that depends on no other row, or one with relates_rows = True$"
    with pytest.raises(BadInput, match=told.replace(" x ", r" (0\.)?x ")):
        distil({"a": made()})
    says_so = made()
    says_so.relates_rows = True
    for objective in (says_so, Sum([says_so, Hinton()])):
        assert distil({"a": objective}).layout().relates_rows
    assert Sum([says_so, Hinton()]).relates_rows


def test_noise_of_an_objectives_own_relates_no_rows() -> None:
    masked = Formula(lambda s, t, y: (s.logits * torch.rand_like(s.logits)).sum(1))
    state = torch.get_rng_state()
    distil({"a": masked})
    assert torch.equal(torch.get_rng_state(), state)


class Normalised(Objective):
    """Cross-entropy of what a trained BatchNorm makes of the features."""

    uses_teacher = False
    student_layers = MappingProxyType({"layer": "classifier.0"})

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        width = student.features["classifier.0"].shape[1]
        self.head = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 10))

    def adapt(self, student: Outputs) -> Outputs:
        return student._replace(features={"x": self.head(student.features["classifier.0"])})

    def forward(self, student: Outputs, teacher: Outputs | None, labels: torch.Tensor) -> dict[str, Term]:
        x = student.features["x"]
        return {"x": Term(F.cross_entropy(x, labels, reduction="none"), 1.0), "ce": ce_term(student, labels, 0.0)}


def test_an_objectives_own_batch_norm_is_over_the_global_batch() -> None:
    def ended(devices: int) -> dict[str, torch.Tensor]:
        module = distil({"x": Normalised()})
        return student_weights(fit(module, digits(), devices, precision="64-true"), "x")

    assert_same(ended(1), ended(2), atol=1e-9)


def test_losses_are_computed_in_float32_under_autocast_also_of_objectives_that_come() -> None:
    def divergence(s: Outputs, t: Outputs, _y: torch.Tensor) -> torch.Tensor:
        log_p, log_q = (x.logits.log_softmax(-1) for x in (t, s))
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    module = distil({"kd": Hinton(), "own": Sum([Formula(divergence)])})
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 10, generator=generator)
    z_s, z_t = z.bfloat16(), (z + 0.1 * torch.randn(50, 10, generator=generator)).bfloat16()
    labels = torch.arange(50) % 10
    with torch.autocast("cpu", torch.bfloat16):
        outputs = Outputs(z_t, {}), dict.fromkeys(module.students, Outputs(z_s, {}))
        _, parts = module.losses(outputs, Batch.of((z, labels), 0))
    z_s, z_t = z_s.double(), z_t.double()
    for key, temperature in (("kd/kd", 2), ("own/0.x", 1)):
        log_p, log_q = ((x / temperature).log_softmax(-1) for x in (z_t, z_s))
        expected = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
        torch.testing.assert_close(parts[key].double(), expected, rtol=1e-3, atol=0)
    ce = F.cross_entropy(z_s, labels, reduction="none")
    torch.testing.assert_close(parts["kd/ce"].double(), ce, rtol=1e-6, atol=0)
    classifier = LitClassifier(net()).losses(z_s.bfloat16(), Batch.of((z, labels), 0))[1]  # as under bf16-true
    torch.testing.assert_close(classifier["loss"].double(), ce, rtol=1e-6, atol=0)


def test_a_layout_is_found_out_once_until_a_run_fails() -> None:
    module = distil({"rkd": RKD(), "kd": Hinton()})
    layout = module.layout()
    assert module.layout() is layout
    assert layout.relates_rows
    module.failed["rkd"] = {"step": 0, "term": "loss"}
    assert not module.layout().relates_rows
