"""A layer whose activations are recomputed trains as any other, whatever state its forward changes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD

from apprentice.keyed import with_seed
from lit_modules.classifier import LitClassifier
from strategies import FSDP
from strategies.sharding import recompute
from tests.training import assert_same, digits, fit, weights

WIDTH = 6


class Changing(nn.Module):
    """Scales by a state that each forward changes: in place, out of autograd's sight, by a new tensor, a number."""

    state: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count, self.linear = how, 0, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(()))
        self.other = nn.Module()
        self.other.register_buffer("state", self.state)  # in two places

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.other.state += 1
        elif self.how == "data":
            self.state.data.add_(1)
        elif self.how == "new":
            self.state = self.state + 1
        else:
            self.count += 1
        return self.linear(x).tanh() * (self.state + self.count) + x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "spectral norm by hooks": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    **{how: (lambda how=how: Changing(how)) for how in ("in place", "data", "new", "number")},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_recomputed_from_the_state_at_the_start_of_its_forward(name: str) -> None:
    layer = LAYERS[name]().double()
    ours = copy.deepcopy(layer)
    recompute(ours)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    for module in (layer, ours):
        torch.manual_seed(0)
        losses = [module(rows).square().sum() for rows in x]  # of accumulated batches
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    assert_same(weights(layer), weights(ours))
    assert_same({n: p.grad for n, p in layer.named_parameters()}, {n: p.grad for n, p in ours.named_parameters()})
    assert getattr(layer, "count", 0) == getattr(ours, "count", 0)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.Sequential(*(LAYERS[name]() for name in ("BatchNorm", "spectral norm", "in place")))
        self.blocks[0][2] = nn.Tanh()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images.flatten(1))))


def test_fsdp_trains_such_layers_as_one_device() -> None:
    ended = []
    for devices, options in ((1, {}), (2, {"strategy": FSDP(timeout=60, activation_checkpointing=True)})):
        module = LitClassifier(with_seed(0, Blocks), optimizer=lambda parameters: SGD(parameters, 0.1))
        ended.append(weights(fit(module, digits(), devices, precision="64-true", **options)))
    assert_same(*ended, atol=1e-9)
