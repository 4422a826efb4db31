"""What a net gives for a batch: logits, features of the layers that are read, and what stands for many logits."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets.attention.precision import widen

# Kinds of outputs: logits of exclusive classes; logits of labels, of which a sample may have several; numbers; vectors;
# scores of pairs of texts, or the embeddings that give them.
KINDS = CLASSES, LABELS, VALUES, EMBEDDINGS, SCORES = "classes", "labels", "values", "embeddings", "scores"
UNLABELLED = EMBEDDINGS, SCORES


class HeadInputs(NamedTuple):
    """What logits (b, T, V) are computed from: the inputs of a language model's last layer, and its weights."""

    inputs: Tensor  # (b, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


class TopTokens(NamedTuple):
    """A distribution in k tokens: the likeliest, of which the logits are log-probabilities (b, T, k), or draws."""

    tokens: Tensor | None  # (b, T, k) int64, the likeliest
    tails: Mapping[float, Tensor]  # (b, T) by temperature t, the logarithm of the sum of p^(1/t) over all other tokens
    draws: Mapping[float, Tensor]  # (b, T, k) int64 by temperature, tokens that were drawn

    def map(self, function: Callable[[Tensor], Tensor]) -> "TopTokens":
        """Apply a function to each tensor."""
        tails, draws = ({t: function(x) for t, x in by.items()} for by in (self.tails, self.draws))
        return TopTokens(None if self.tokens is None else function(self.tokens), tails, draws)


class Outputs(NamedTuple):
    """A net's outputs for b inputs: logits (b, ..., classes), and features of the requested layers by path.

    Where a language model's head is left out, logits have a shape alone (they are on the meta device), and `hidden` has
    what they are computed from.
    """

    logits: Tensor
    features: dict[str, Tensor]
    # Features that parts of objectives made for themselves, by (student, path), or (student, part of a sum, path).
    condensed: Mapping[tuple[str, ...], Tensor] = {}
    # () where there is nothing of the kind: None would be a leaf of a tree of tensors.
    hidden: HeadInputs | tuple[()] = ()
    top_k: TopTokens | tuple[()] = ()

    def with_features(self, features: Mapping[str, Tensor]) -> "Outputs":
        """Return these outputs with features added or replaced."""
        return self._replace(features={**self.features, **features})

    def map(self, function: Callable[[Tensor], Tensor]) -> "Outputs":
        """Apply a function to each tensor but weights: logits, features, own ones, inputs of the head, k tokens."""
        return Outputs(
            function(self.logits),
            {path: function(x) for path, x in self.features.items()},
            {path: function(x) for path, x in self.condensed.items()},
            self.hidden and self.hidden._replace(inputs=function(self.hidden.inputs)),
            self.top_k and self.top_k.map(function),
        )

    def tensors(self) -> list[Tensor]:
        """Return the logits and all features."""
        return [self.logits, *self.features.values(), *self.condensed.values()]

    def named(self) -> dict[str, Tensor]:
        """Return logits and features by names for a file."""
        condensed = {f"own {json.dumps(path)}": x for path, x in self.condensed.items()}
        return {"logits": self.logits, **{f"feature {path}": x for path, x in self.features.items()}, **condensed}

    def widen(self) -> "Outputs":
        """Cast 16-bit types to float32."""
        return self.map(widen)

    def match_dtype(self, net: nn.Module) -> "Outputs":
        """Cast another net's float64 outputs to float32, unless this net's parameters are float64."""
        if all(x.dtype != torch.float64 for x in self.tensors()):
            return self
        if any(p.dtype == torch.float64 for p in net.parameters()):
            return self
        return self.map(lambda x: x.float() if x.dtype == torch.float64 else x)

    def logits_at(self, places: Tensor) -> Tensor:
        """Return the logits (n, V) of tokens at places (n,) among b * T."""
        if not self.hidden:
            return self.logits.flatten(0, 1)[places]
        return logits_of(self.hidden.inputs.flatten(0, 1)[places], self.hidden.weight, self.hidden.bias)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits (n, V) of the head's inputs (n, H), in the type of autocast if that is on."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return F.linear(hidden, weight, bias)
