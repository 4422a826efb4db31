"""Files of weights: read without running code, and loaded into a net after every key, shape and value is checked."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apprentice.errors import BadInput

Tensors = dict[str, torch.Tensor]
# What files of weights hold beside tensors, and torch takes for code: the settings of a script, and numpy's numbers.
_SCALAR = np.float64(0).__reduce__()[0]
HARMLESS: list[Any] = [
    Namespace, type(Path()), np.dtype, *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]  # fmt: skip


def read_weights(path: str, flag: str) -> Tensors:
    """The state dict in a user's file: bare, or inside a checkpoint, Lightning's or another's.

    Raises:
        BadInput: no such file, not a checkpoint, cut short, or a pickle that would have to run code.
    """
    if not Path(path).is_file():
        raise BadInput(flag, path, "a file of weights; there is none")
    try:
        with torch.serialization.safe_globals(HARMLESS):
            content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001 - torch.load of a broken file raises whatever its parser meets
        runs_code = "GLOBAL " in str(error)  # a pickle that names a function or class of its own
        why = "cut short or no checkpoint at all" if not runs_code else "more than a state_dict: it would run code"
        raise BadInput(flag, path, f"a file of weights; it is {why}") from None
    for key in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise BadInput(flag, path, "a file of weights; it holds no state dict")
    return content


def load_weights(net: torch.nn.Module, path: str, flag: str) -> None:
    """Load a user's file of weights into a net, which one of the two may have wrapped: `module.`, `model.`.

    Raises:
        BadInput: the file can't be read, or its weights are another net's or no numbers to compute with; the message
            names the first of them.
    """
    weights, own = read_weights(path, flag), net.state_dict()
    name, wrapper = type(net).__name__, _shared(own)
    prefix = _shared(weights).removesuffix(wrapper)
    weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    if not any(key.startswith(wrapper) for key in weights):  # of the bare net
        weights = {wrapper + key: value for key, value in weights.items()}
    unused = tuple(getattr(net, "unused_weights", ()))  # which files of the net's kind hold, and the net does without
    weights = {key: value for key, value in weights.items() if not key.startswith(unused)}
    if missing := [key for key in own if key not in weights]:
        raise BadInput(flag, path, f"weights of {name}; {missing[0]} is missing ({len(missing)} of {len(own)} are)")
    if extra := [key for key in weights if key not in own]:
        raise BadInput(flag, path, f"weights of {name}, which has no {extra[0]} ({len(extra)} more than it has)")
    for key, value in weights.items():
        if value.shape != own[key].shape:
            shapes = f"{key} is {tuple(value.shape)} there and {tuple(own[key].shape)} here"
            raise BadInput(flag, path, f"weights of {name}; {shapes}")
    _check_values(own, weights, path, flag)
    net.load_state_dict(weights)


def fitting(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], path: str, flag: str) -> Tensors:
    """The weights, if they are those that are wanted, no more and no less.

    Raises:
        BadInput: naming every key that does not fit.
    """
    faults = {
        "missing": [key for key in own if key not in weights],
        "unknown": [key for key in weights if key not in own],
        "of another shape": [
            f"{key} {tuple(value.shape)}, not {tuple(own[key].shape)}"
            for key, value in weights.items() if key in own and value.shape != own[key].shape
        ],
    }  # fmt: skip
    if any(faults.values()):
        told = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in faults.items() if keys)
        raise BadInput(flag, path, f"weights that fit the net; {told}")
    _check_values(own, weights, path, flag)
    return dict(weights)


def _check_values(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], path: str, flag: str) -> None:
    """Refuse integers and what is not finite where the net has finite floats: a mask of its own may hold infinities."""
    for key, value in weights.items():
        if not own[key].is_floating_point():
            continue
        if not value.is_floating_point():
            raise BadInput(flag, path, f"floats as weights; {key} is {str(value.dtype).removeprefix('torch.')}")
        if spoilt := int((own[key].cpu().isfinite() & ~value.float().isfinite()).sum()):
            raise BadInput(
                flag, path, f"finite weights; {key} has {spoilt} of {value.numel()} that are NaN or infinite"
            )


def _shared(keys: Iterable[str]) -> str:
    """The parts that all keys begin with, as `module.`, or `net.` of a LightningModule around its net."""
    parts = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))
