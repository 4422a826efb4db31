"""Scores of language models in chunks of tokens: the logits of all tokens of a batch are never held at once."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apprentice.batch import label_mask
from lit_modules.nets.token_head import TokenHead, is_whole, logits_of
from lit_modules.objectives.base import cross_entropy
from lit_modules.tasks.scores import TokenValues, compare_logits


class HeadInputs(NamedTuple):
    """What logits (b, T, V) are computed from: the inputs of a language model's last layer, and its weights."""

    hidden: Tensor  # (b, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)

    @property
    def shape(self) -> torch.Size:
        """That of the logits."""
        return torch.Size((*self.hidden.shape[:-1], len(self.weight)))


Logits = Tensor | HeadInputs


class Predictions(NamedTuple):
    """Logits (b, ..., classes) of a batch."""

    teacher: Logits | None  # if the test has one to compare with
    students: Mapping[str, Logits]  # by run
    averaged: Mapping[str, Logits]  # by the moving averages of runs' weights

    def measure_tokens(self, labels: Tensor, size: int) -> "Measured":
        """Return what scores are made of, of `size` tokens at a time if some logits are not there."""
        logits = self.teacher, *self.students.values(), *self.averaged.values()
        if not any(isinstance(x, HeadInputs) for x in logits):
            return Measured(self.teacher, self.students, self.averaged)  # type: ignore[arg-type]  # tensors
        students = measure_tokens(self.students, self.teacher, labels, size)
        return Measured(None, students, measure_tokens(self.averaged, None, labels, size))


class Measured(NamedTuple):
    """What scores are made of: logits, or values of tokens, those beside the teacher among them."""

    teacher: Tensor | None
    students: Mapping[str, Tensor | TokenValues]
    averaged: Mapping[str, Tensor | TokenValues]


def has_chunks(net: nn.Module, head: TokenHead | None, size: int) -> bool:
    """Return whether a net's logits are left out, to be computed in chunks: this process has the head as one tensor."""
    return bool(size) and head is not None and is_whole(net, head)


@torch.no_grad()
def measure_tokens(
    nets: Mapping[str, Logits], teacher: Logits | None, labels: Tensor, size: int
) -> dict[str, TokenValues]:
    """Compute cross-entropies and, beside a teacher, divergence and agreement of tokens whose labels (b, T) count.

    Values (b, T) float64 are 0 where a label does not count. The teacher's logits of a chunk serve all nets.
    """
    known, counted = labels.flatten(), label_mask(labels).flatten().nonzero().flatten()
    names = ("ce",) if teacher is None else ("ce", "kl", "agreement")
    values = {
        net: {name: torch.zeros(labels.numel(), dtype=torch.float64, device=labels.device) for name in names}
        for net in nets
    }
    for places in counted.split(size or max(len(counted), 1)):
        taught = None if teacher is None else _at(teacher, places)
        for net, logits in nets.items():
            z = _at(logits, places)
            chunk = {"ce": cross_entropy(z, known[places])}
            if taught is not None:
                chunk |= compare_logits(z, taught)
            for name, x in chunk.items():
                values[net][name][places] = x.double()
    by_token = {net: {name: x.view(labels.shape) for name, x in of.items()} for net, of in values.items()}
    return {net: TokenValues(of.pop("ce"), of) for net, of in by_token.items()}


def _at(logits: Logits, places: Tensor) -> Tensor:
    """Return the logits (n, V) of tokens at places (n,) among b * T."""
    if isinstance(logits, HeadInputs):
        return logits_of(logits.hidden.flatten(0, 1)[places], logits.weight, logits.bias)
    return logits.flatten(0, 1)[places]
