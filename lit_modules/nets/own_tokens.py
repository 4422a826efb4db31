"""What language models of transformers share, which read and write the tokens of their own tokenizer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from apprentice.errors import BadInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OwnTokens:
    """A net that begins with a model's weights, if `pretrained`: it is a trained one, and brings its tokenizer."""

    untrained: ClassVar[Mapping[str, Any]] = MappingProxyType({"pretrained": False})
    trained_if = "pretrained"

    @classmethod
    def tokenizer_from(cls, options: Mapping[str, Any]) -> str | None:
        """Its own, if it begins with its weights."""
        return options["name"] if options.get("pretrained") else None


def read_dtype(dtype: str, config: Mapping[str, Any] | None, pretrained: bool) -> torch.dtype:
    """Return the type of a model's weights; BadInput for another name, or for changes to pretrained weights' config."""
    if config and pretrained:
        raise BadInput("config", config, "not allowed with pretrained weights; Pruned keeps a part of a teacher's")
    if dtype not in DTYPES:
        raise BadInput("dtype", dtype, " or ".join(DTYPES))
    return DTYPES[dtype]


def check_model(name: str, config: Any, missing: list[str], vocab_size: int, block_size: int) -> int | None:
    """Return the positions that a model of this configuration has, None if these have no end.

    BadInput if weights are missing, or it has fewer tokens or positions.
    """
    if missing:
        raise BadInput("name", name, f"a model with all its weights; it has no {missing[0]}")
    places: int | None = getattr(config, "max_position_embeddings", None)
    for what, largest, needed in (("tokens", config.vocab_size, vocab_size), ("tokens of a text", places, block_size)):
        if largest is not None and largest < needed:
            raise BadInput("name", name, f"a model for {needed} {what}; it has {largest}")
    return places
