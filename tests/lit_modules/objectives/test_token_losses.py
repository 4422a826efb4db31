"""Losses of language models beside those of TRL, a second witness, and at their bounds."""

import warnings
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from experiments import kd
from lit_modules.nets import Outputs
from lit_modules.objectives import GKD, AdaptiveKL, SkewKL, TotalVariation

B, T, V = 2, 5, 13
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (GKD, {"beta": 1.5}, "beta 1.5: expected a number from 0 to 1"),
    (GKD, {"gkd_weight": 0, "on_policy": 0.5}, "gkd_weight 0: expected above 0 beside on_policy"),
    (GKD, {"gkd_weight": -1}, "gkd_weight -1: expected a number of 0 or more"),
    (SkewKL, {"alpha": 1.0}, "alpha 1.0: expected a share of 0 or more, below 1"),
    (AdaptiveKL, {"head": 0.0}, "head 0.0: expected a probability above 0 and below 1"),
    (TotalVariation, {"temperature": 0}, "temperature 0: expected a number above 0"),
]


def logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.extras("trl")
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_gkd_at_temperature_one_is_trls(beta: float) -> None:
    with warnings.catch_warnings(action="ignore"):  # from what it imports
        from trl.experimental.gkd import GKDTrainer

    student, teacher = logits(1).requires_grad_(), logits(2)
    labels = torch.arange(B * T).view(B, T) % V
    labels[0, :2] = -100
    theirs = GKDTrainer.generalized_jsd_loss(
        student, teacher, labels, beta, num_items_in_batch=int((labels >= 0).sum())
    )
    values = GKD(beta)(Outputs(student, {}), Outputs(teacher, {}), labels)["gkd"].values
    ours = values[labels >= 0].mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("objective", "options", "line"), WRONG)
def test_values_that_cannot_be_used_are_refused(objective: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as error:
        objective(**options)
    assert str(error.value).startswith(line)


def test_equal_nets_have_no_loss_and_a_skew_of_none_is_forward_kl() -> None:
    outputs, y = Outputs(logits(1), {}), torch.zeros(B, T, dtype=torch.int64)
    for objective in (GKD(), GKD(0), GKD(1), SkewKL(), SkewKL(reverse=True), AdaptiveKL(), TotalVariation()):
        assert next(iter(objective(outputs, outputs, y).values())).values.abs().max() < 1e-14
    pair = outputs, Outputs(logits(2), {})
    skew, forward = (next(iter(o(*pair, y).values())).values for o in (SkewKL(alpha=0.0), GKD(0)))
    assert torch.equal(skew, forward)


def test_only_takes_methods_by_name_without_the_zoo() -> None:
    config = kd.parser().parse(["--data", "Text", "--only", "ce", "reverse", "gkd", "tv", "--variants.gkd.beta", "0.1"])
    named = {name: config.variants[name].name for name in ("reverse", "gkd", "tv")}
    assert named == {"reverse": "ReverseKL", "gkd": "GKD", "tv": "TotalVariation"}
    assert config.variants["gkd"].init_args["beta"] == 0.1
    assert "tv" not in kd.parser().parse(["--only", "ce"]).variants
