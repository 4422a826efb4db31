"""Making and loading models of transformers, whatever they are for."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from apprentice.errors import BadInput, reason
from apprentice.extras import need

SAFE: dict[str, Any] = {"trust_remote_code": False}  # it would ask on a terminal


def load_model(kind: Any, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, list[str]]:
    """Load a model with its weights; return also the names of the weights that it lacks."""
    model, info = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **SAFE, **options)
    return model, sorted(info["missing_keys"])


def change_config(config: Any, changes: Mapping[str, Any]) -> None:
    """Change a configuration of transformers in place, by its own names or those that all families share.

    Raises:
        BadInput: it has no such key, or heads that don't divide what they share.
    """
    for key, value in changes.items():
        if not hasattr(config, key):
            raise BadInput("config", {key: value}, f"keys of {type(config).__name__}, as num_hidden_layers")
        setattr(config, key, value)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "layer_types" not in changes and len(kinds) != config.num_hidden_layers:
        config.layer_types = [kinds[number % len(kinds)] for number in range(config.num_hidden_layers)]
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not changes or not isinstance(heads, int) or not isinstance(width, int):
        return
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads < 1 or heads % groups:
        expected = f"num_attention_heads that num_key_value_heads divides; {groups} do not divide {heads}"
        raise BadInput("config", dict(changes), expected)
    if getattr(config, "head_dim", None) is None and width % heads:
        expected = f"a hidden_size that num_attention_heads divides; {heads} do not divide {width}"
        raise BadInput("config", dict(changes), expected)


@contextmanager
def import_transformers(name: str, expected: str) -> Iterator[Any]:
    """Inside, use the package without its output; turn what it raises into BadInput with its words."""
    need("transformers", "transformers.modeling_utils")  # which imports torchao, if that is there
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):  # from what a model imports
            yield transformers
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        raise BadInput("name", name, f"{expected}; it says: {reason(error)}") from None


def find_block_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks of a model of texts: the members of its longest list of modules."""
    lists = {path: len(m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    path = max(lists, key=lambda path: lists[path], default="")
    return tuple(f"model.{path}.{number}" for number in range(lists.get(path, 0)))
