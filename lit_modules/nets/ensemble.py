"""Several trained nets as one, such as a teacher whose members were trained with different seeds."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Net

MEMBERS = "members"  # the layer of the members' logits; objectives get it from any teacher that has it
SHARES = "shares"  # the layer of the logarithms of the members' weights, if they have some


class Ensemble(Net):
    """The mean of the members' probabilities: logits (B, classes) are its logarithm.

    The layer `members` gives each member's logits (B, members, classes), because the mean of softened probabilities is
    not the softened mean. The members are frozen: an ensemble is a teacher.

    Args:
        members: one trained net or more, of the same classes; on the command line their folders, as
            `[RUN/seed0/teacher, RUN/seed1/teacher]`.
        weights: a number above 0 for each member, of which a mean takes its share; default: equal ones.
        average: what the mean is of: probabilities, softened by the temperature of the objective, or logits.

    Raises:
        BadInput: no members, other than one weight for each, or members whose weights belong to different images or
            tokens.
    """

    is_trained = True
    feature_layer = ""

    def __init__(
        self,
        members: list[Any],
        weights: list[float] | None = None,
        average: Literal["probabilities", "logits"] = "probabilities",
    ) -> None:
        super().__init__()
        if not members:
            raise BadInput("members", members, "one trained net or more")
        if weights is not None and not (len(weights) == len(members) and all(0 < w < math.inf for w in weights)):
            raise BadInput("weights", weights, f"as many numbers above 0 as members, {len(members)}")
        self.average, self.members = average, _Members(members)
        values = weights or [1.0] * len(members)
        self.shares = _Shares([value / math.fsum(values) for value in values])
        read = (MEMBERS, SHARES) if weights else (MEMBERS,)
        self.member_layers: tuple[str, ...] = read if average == "probabilities" else ()  # that objectives read
        self._collect_demands(members)
        sizes = [size for member in members if (size := getattr(member, "block_size", None)) is not None]
        self.block_size: int | None = min(sizes, default=None)  # of texts, that all members can read
        self.requires_grad_(False).eval()

    def _collect_demands(self, members: Sequence[nn.Module]) -> None:
        """Take over what images and tokens the members' weights expect."""
        for member in members:
            expects, tokenizer = getattr(member, "expects", {}), getattr(member, "tokenizer", None)
            for name, value in {**expects, "tokenizer": tokenizer}.items():
                known = self.tokenizer if name == "tokenizer" else self.expects.get(name)
                if None not in (value, known) and value != known:
                    raise BadInput("members", value, f"nets whose weights expect one {name}; another has {known}")
            self.expects, self.tokenizer = {**self.expects, **expects}, self.tokenizer or tokenizer

    def forward(self, inputs: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of inputs (B, ...); of rows with several texts `starts` (B, T) are as GPT has them."""
        logits = self.members(inputs) if starts is None else self.members(inputs, starts)
        shares = self.shares(logits) if SHARES in self.member_layers or self.average == "logits" else None
        if self.average == "logits":
            assert shares is not None
            mean: Tensor = (logits * _beside(shares.exp(), logits)).sum(1)
            return mean
        return average_members(logits, shares)


def average_members(logits: Tensor, shares: Tensor | None) -> Tensor:
    """Return the logarithm of the mean of the members' probabilities, (B, ..., classes).

    Args:
        logits: (B, members, ..., classes).
        shares: (B, 1, members), logarithms of their weights, whose sum is 1; None for equal ones.
    """
    z = logits.log_softmax(-1)
    if shares is None:
        return z.logsumexp(1) - math.log(z.shape[1])
    return (z + _beside(shares, z)).logsumexp(1)


def _beside(shares: Tensor, logits: Tensor) -> Tensor:
    """Bring shares (B, 1, members) to the dimensions of logits (B, members, ..., classes)."""
    return shares.reshape(*logits.shape[:2], *[1] * (logits.dim() - 2))


class _Members(nn.Module):
    def __init__(self, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, inputs: Tensor, starts: Tensor | None = None) -> Tensor:
        logits = [net(inputs) if starts is None else net(inputs, starts) for net in self.nets]
        classes = [x.shape[-1] for x in logits]
        if any(count != classes[0] for count in classes):
            raise BadInput("members", classes, "nets of the same classes; these are their numbers of logits")
        return torch.stack(logits, 1)  # (B, members, classes)


class _Shares(nn.Module):
    """The logarithms of the weights, (B, 1, members), for logits (B, members, ..., classes)."""

    def __init__(self, shares: Sequence[float]) -> None:
        super().__init__()
        self.logarithms = [math.log(share) for share in shares]

    def forward(self, logits: Tensor) -> Tensor:
        batch = logits.shape[0]  # len() would fix the size of an exported batch
        return logits.new_tensor(self.logarithms).expand(batch, 1, -1)
