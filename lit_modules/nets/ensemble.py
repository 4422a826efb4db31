"""Several trained nets as one, such as a teacher whose members were trained with different seeds."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Net

MEMBERS = "members"  # the layer of the members' logits; objectives get it from any teacher that has it


class Ensemble(Net):
    """The mean of the members' probabilities: logits (B, classes) are its logarithm.

    The layer `members` gives each member's logits (B, members, classes), because the mean of softened probabilities is
    not the softened mean. The members are frozen: an ensemble is a teacher.

    Args:
        members: one trained net or more, of the same classes; on the command line their folders, as
            `[RUN/seed0/teacher, RUN/seed1/teacher]`.
    """

    is_trained = True
    feature_layer = ""

    def __init__(self, members: list[Any]) -> None:
        super().__init__()
        if not members:
            raise BadInput("members", members, "one trained net or more")
        self.members = _Members(members)
        self.requires_grad_(False).eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, classes) of inputs (B, ...)."""
        logits: Tensor = self.members(inputs)
        return logits.log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])


class _Members(nn.Module):
    def __init__(self, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, inputs: Tensor) -> Tensor:
        logits = [net(inputs) for net in self.nets]
        if len({x.shape for x in logits}) > 1:
            classes = [x.shape[-1] for x in logits]
            raise BadInput("members", classes, "nets of the same classes; these are their numbers of logits")
        return torch.stack(logits, 1)  # (B, members, classes)
