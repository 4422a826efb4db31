"""Students that learn from one another: a cohort is the same alone and in company, and fails together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import DML, CrossEntropy, Hinton, Objective, Place, Sum
from tests.formulas import assert_equal
from tests.training import SHAPE, assert_same, digits, fit, net, weights

COHORT = {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}


def module(*others: str, **cohort: list[str]) -> Distillation:
    made: dict[str, tuple[torch.nn.Module, Objective]] = {name: (net(), CrossEntropy()) for name in others}
    named = cohort or COHORT
    made |= {name: (net(seed=i), DML(peers)) for i, (name, peers) in enumerate(named.items(), 1)}
    return Distillation(net(DeepNN, seed=1), made, input_shape=SHAPE)


def test_the_paper_s_formula() -> None:
    g = torch.Generator().manual_seed(0)
    z, *others = (torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(3))
    z.requires_grad_()
    objective, labels = DML(["a", "b"], mutual_weight=2.0), torch.tensor([0, 2, 1, 1])
    objective.place = Place(peers={name: Outputs(x, {}) for name, x in zip("ab", others, strict=True)})
    terms = objective(Outputs(z, {}), None, labels)
    q = z.softmax(1)
    expected = sum((p * (p / q).log()).sum(1) for p in (x.softmax(1) for x in others)) / 2
    torch.testing.assert_close(terms["ce"].values, F.cross_entropy(z, labels, reduction="none"))
    assert [term.weight for term in terms.values()] == [2.0, 1.0]
    assert_equal(terms["mutual"].values, expected, z, rtol=1e-10, atol=1e-14)


def test_a_cohort_of_three_is_the_same_on_any_number_of_processes() -> None:  # of two: tests/harness/test_zoo.py
    one, three = (weights(fit(module("ce"), digits(), n, precision="64-true")) for n in (1, 3))
    assert_same(one, three, atol=1e-9)
    first = [one[f"students.{name}.net.features.0.weight"].sum().item() for name in COHORT]
    assert len({*first}) == 3


class Watching(DML):
    def forward(self, *args: Any) -> Any:
        assert not any(peer.logits.requires_grad for peer in self.place.peers.values())
        return super().forward(*args)


class FailsAt(CrossEntropy):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any) -> Any:
        terms = super().forward(*args)
        ce = terms["ce"]
        return {"ce": ce._replace(values=ce.values / (self.place.step != self.step))}


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
    ("cohort", "message"),
    [
        ({"a": ["q"], "b": ["a"]}, r"variants\.a\.peers q: expected students trained beside it: b"),
        ({"a": ["a"]}, r"variants\.a\.peers a: expected students trained beside it: there are none"),
        ({"a": []}, r"peers \[\]: expected names of one student or more"),
        ({"a": ["b", "b"]}, r"peers \['b', 'b'\]: expected names of one student or more, each once"),
    ],
)
def test_peers_that_are_not_there_are_refused(cohort: dict[str, list[str]], message: str) -> None:
    with pytest.raises(BadInput, match=f"^{message}"):
        module(**cohort)
