"""Scores of language models in chunks of tokens: the logits of all tokens of a batch are never held at once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from apprentice.batch import label_mask
from lit_modules.nets.outputs import Outputs
from lit_modules.objectives.base import cross_entropy
from lit_modules.tasks.scores import TokenValues, compare_logits


@torch.no_grad()
def measure_tokens(
    nets: Mapping[str, Outputs], teacher: Outputs | None, labels: Tensor, size: int
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
        taught = None if teacher is None else teacher.logits_at(places)
        for net, outputs in nets.items():
            z = outputs.logits_at(places)
            chunk = {"ce": cross_entropy(z, known[places])}
            if taught is not None:
                chunk |= compare_logits(z, taught)
            for name, x in chunk.items():
                values[net][name][places] = x.double()
    by_token = {net: {name: x.view(labels.shape) for name, x in of.items()} for net, of in values.items()}
    return {net: TokenValues(of.pop("ce"), of) for net, of in by_token.items()}
