"""A layer whose activations are recomputed trains as any other, whatever state its forward changes."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD

from apprentice.keyed import with_seed
from lit_modules.classifier import LitClassifier
from strategies import FSDP
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


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
            nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
            nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),  # by hooks
            *(Changing(how) for how in ("in place", "data", "new", "number")),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images.flatten(1))))


def test_fsdp_trains_such_layers_as_one_device() -> None:
    ended = []
    for devices, options in ((1, {}), (2, {"strategy": FSDP(timeout=60, activation_checkpointing=True)})):
        module = LitClassifier(with_seed(0, Blocks), optimizer=lambda parameters: SGD(parameters, 0.1))
        ended.append(weights(fit(module, digits(), devices, precision="64-true", **options)))
    assert_same(*ended, atol=1e-9)
