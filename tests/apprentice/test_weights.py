"""Weights fit a net, or every fault is named."""

import torch

from apprentice.weights import check_weights
from lit_modules.nets import ResNet
from tests.commands import bad_input
from tests.training import net


def test_weights_fit_or_every_fault_is_named() -> None:
    own, state = (net(ResNet, depth=8, seed=seed).state_dict() for seed in (0, 5))
    check_weights(own, state, "FILE", "run")
    for key in ("stem.1.running_mean", "head.bias"):
        del state[key]
    state |= {"strange": torch.zeros(1), "head.weight": torch.zeros(3, 64)}
    for word in ("FILE", "missing: stem.1.running_mean, head.bias;", "unknown: strange;", "head.weight (3, 64)"):
        assert word in bad_input(check_weights, own, state, "FILE", "run")
