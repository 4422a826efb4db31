"""What the framework gives an objective: its place, teacher outputs, state, peers, hidden labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import Batch
from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import CrossEntropy, FeatureObjective, Hinton, Objective, Sum, Term
from lit_modules.objectives.cross_entropy import ce_term
from strategies import DDP, FSDP, PipelineStrategy
from tests.strategies.test_strategies import SaveAndStop
from tests.training import SHAPE, assert_same, digits, fit, net, trainer, weights


def module(seeds: Sequence[int] = (), **students: Objective) -> Distillation:
    nets = [net(seed=seed) for seed in seeds] or [net() for _ in students]
    made = dict(zip(students, zip(nets, students.values(), strict=True), strict=True))
    return Distillation(net(DeepNN, seed=1), made, input_shape=SHAPE, samples=101)


class Seen(Objective):
    """Notes its places."""

    uses_teacher = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        if student.logits.requires_grad and self.place.samples:
            self.seen.append(self.place)
        return {"ce": ce_term(student, labels, 1.0)}


def test_an_objective_knows_its_place() -> None:
    data, seen, within = digits(), Seen(), Seen()
    fit(module(a=seen, b=Sum([within])), data)
    own = [place for place in seen.seen if place.count > 3]  # not of the checks before training
    assert [place.step for place in own] == list(range(6))  # two epochs of three batches
    assert [place.epoch for place in own] == [pytest.approx(step / 3) for step in range(6)]
    assert [place.progress for place in own] == [pytest.approx(step / 6) for step in range(6)]
    assert [place.count for place in own] == [37, 37, 27] * 2
    assert {place.samples for place in own} == {101}
    for first in (0, 3):
        assert sorted(torch.cat([place.index for place in own[first : first + 3]]).tolist()) == list(range(101))
    assert [place.step for place in within.seen if place.count > 3] == list(range(6))


class Banked(FeatureObjective):
    """A mean of all features seen for each sample, on both sides by a trained part; the loss draws rows to the bank."""

    relates_rows = True

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        f_s, f_t = (f.flatten(1) for f in self.features(student, teacher))
        self.own, self.other = nn.Linear(f_s.shape[1], 4), nn.Linear(f_t.shape[1], 4)
        assert self.place.samples
        self.register_buffer("bank", torch.zeros(self.place.samples, 4))

    def adapt(self, student: Outputs) -> Outputs:
        x = self.own(student.features[self.student_layer].flatten(1))
        return student._replace(features={self.student_layer: x})

    def condense(self, teacher: Outputs) -> Outputs:
        return teacher._replace(features={self.teacher_layer: teacher.features[self.teacher_layer].flatten(1)})

    def adapt_teacher(self, teacher: Outputs) -> Outputs:
        return teacher._replace(features={self.teacher_layer: self.other(teacher.features[self.teacher_layer])})

    def teacher_parts(self) -> list[nn.Module]:
        return [self.other]

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        e_s, e_t = self.features(student, teacher)
        known = self.bank.to(e_s.dtype)[self.place.index]  # type: ignore[operator]
        values = (e_s - e_t).square().sum(1) + (e_s - known).square().sum(1) / len(e_s)
        return {"bank": Term(values, 0.1), "ce": ce_term(student, labels, 1.0)}

    def after_batch(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> None:
        index = self.place.index
        self.bank[index] = (self.bank[index] + self.features(student, teacher)[0].to(self.bank.dtype)) / 2  # type: ignore[index]


def banked() -> Distillation:
    return module(a=Banked(), b=Sum([Hinton(), Banked()]))


def test_state_is_the_same_on_any_number_of_processes() -> None:
    alone = weights(fit(banked(), digits(), precision="64-true"))
    assert alone["students.a.objective.bank"].abs().min() > 0
    for strategy, devices in ((DDP(timeout=60), 3), (FSDP(timeout=60), 2)):
        assert_same(alone, weights(fit(banked(), digits(), devices, precision="64-true", strategy=strategy)), atol=1e-9)
    exact = [weights(fit(banked(), digits(), n, strategy=DDP(timeout=60, exact=4))) for n in (1, 2)]
    assert_same(*exact)


def test_state_is_resumed(tmp_path: Path) -> None:
    whole = weights(fit(banked(), digits()))
    fit(banked(), digits(), callbacks=[SaveAndStop(tmp_path / "x.ckpt", 4)])
    again = banked()
    with quiet():
        trainer().fit(again, digits(), ckpt_path=str(tmp_path / "x.ckpt"), weights_only=True)
    assert_same(whole, weights(again))


def test_a_pipeline_trains_no_parts_of_the_teachers_side() -> None:
    expected = "an objective without trained parts for the teacher's outputs"
    with pytest.raises((BadInput, ValueError), match=expected):
        trainer(2, strategy=PipelineStrategy(timeout=60, exact=2)).fit(banked(), digits())


def test_what_is_stored_is_condensed() -> None:
    stored = module(a=Banked(), b=Hinton())._ask_teacher(torch.rand(5, *SHAPE))
    assert {key: tuple(x.shape) for key, x in stored.features.items()} == {"a>default": (5, 128)}


class Imitates(Objective):
    """Half of mutual learning."""

    uses_teacher = False

    def __init__(self, *peers: str, broken: bool = False) -> None:
        super().__init__()
        self.peers, self.broken = peers, broken

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        others = [self.place.peers[peer].logits for peer in self.peers]
        assert not any(z.requires_grad for z in others)
        values = sum(((student.logits - z).square().mean(1) for z in others), start=torch.zeros(()))
        scale = torch.inf if self.broken and self.place.step > 1 else 1.0
        return {"x": Term(values * scale, 0.1), "ce": ce_term(student, labels, 1.0)}


def test_peers_learn_from_one_another_on_any_number_of_processes() -> None:
    def cohort() -> Distillation:
        own = {"a": Imitates("b"), "b": Imitates("a"), "c": Imitates("a", "b"), "d": CrossEntropy()}
        return module([0, 1, 2, 0], **own)  # equal peers would teach one another nothing

    alone = weights(fit(cohort(), digits(), precision="64-true"))
    assert_same(alone, weights(fit(cohort(), digits(), 3, precision="64-true")), atol=1e-9)
    assert not torch.equal(alone["students.a.net.features.0.weight"], alone["students.d.net.features.0.weight"])


def test_a_cohort_fails_together(capsys: pytest.CaptureFixture) -> None:
    failing = fit(module(a=Imitates("b", broken=True), b=Imitates("a"), c=Imitates("b"), d=CrossEntropy()), digits())
    assert {name: fault["step"] for name, fault in failing.failed.items()} == dict.fromkeys("abc", 2)  # type: ignore[union-attr]
    assert "b failed at step 2: its peer a is not finite" in capsys.readouterr().out


@pytest.mark.parametrize("peer", ["nobody", "a"])
def test_a_peer_is_another_student(peer: str) -> None:
    with pytest.raises(BadInput, match=rf"^variants\.a\.peers {peer}: expected students trained beside it: b$"):
        module(a=Imitates(peer), b=CrossEntropy())


def test_hidden_labels_count_for_nothing() -> None:
    students: Any = {"a": (net(), CrossEntropy()), "b": (net(), Hinton())}
    one = Distillation(net(DeepNN, seed=1), students, input_shape=SHAPE, labelled=False)
    x, y, rows = torch.rand(6, *SHAPE), torch.tensor([3, -1, 5, -1, -1, 1]), torch.arange(6)
    batch = Batch(x, y, rows, rows, 6, 1, 0, label_weight=6 / 3)
    one.eval()
    outputs = one._ask_teacher(x), one(x)[1]
    loss, parts = one.losses(outputs, batch)
    known = rows[y >= 0]
    few = Batch(x[known], y[known], known, torch.arange(3), 3, 1, 0)
    theirs = one.losses((one._ask_teacher(x[known]), one(x[known])[1]), few)[1]
    for name in ("a/ce", "b/ce", "a/acc", "b/acc"):
        torch.testing.assert_close(batch.mean(parts[name]), few.mean(theirs[name].float()))
    whole = one.losses(outputs, Batch(x, y.clamp(min=0), rows, rows, 6, 1, 0))[1]
    assert torch.equal(parts["b/kd"], whole["b/kd"])
    expected = batch.mean(parts["a/ce"]) + 0.75 * batch.mean(parts["b/ce"]) + 0.25 * batch.mean(parts["b/kd"])
    torch.testing.assert_close(loss, expected)
    none = one.losses(outputs, batch._replace(labels=torch.full((6,), -1), label_weight=6.0))[1]
    assert none["a/ce"].abs().max() == 0


class Undeclared(Objective):
    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        return {"x": Term(student.logits.gather(1, labels[:, None])[:, 0], 1.0), "ce": ce_term(student, labels, 1.0)}


def test_a_term_that_needs_labels_says_so() -> None:
    teacher = net(DeepNN, seed=1)
    Distillation(teacher, {"a": (net(), Undeclared())}, input_shape=SHAPE)
    expected = r"^variants\.a Undeclared: expected an objective whose term x needs no label, as some are hidden"
    with pytest.raises(BadInput, match=expected):
        Distillation(teacher, {"a": (net(), Undeclared())}, input_shape=SHAPE, labelled=False)
