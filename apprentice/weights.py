"""Weights files: read without running code, and loaded into a net after all keys, shapes and values are checked."""

import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput

LISTED = 20  # keys in a message, of a kind
# What weights files hold beside tensors, and torch takes for code: a script's settings, and numpy's numbers.
_SCALAR = np.float64(0).__reduce__()[0]
HARMLESS: list[Any] = [
    Namespace, type(Path()), np.dtype, *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]  # fmt: skip


def read_saved(path: str | Path, flag: str, what: str = "a file of weights") -> Any:
    """What torch saved in a user's file, on the CPU; code in the file is never run.

    Raises:
        BadInput: there is no such file, or it can't be read, is damaged, or a pickle that would run code.
    """
    if not Path(path).is_file():
        raise BadInput(flag, path, f"{what}; there is none")
    try:
        # torch does not compare an archive's contents with their checksums.
        if zipfile.is_zipfile(path) and (member := zipfile.ZipFile(path).testzip()):
            raise BadInput(flag, path, f"{what}; it is damaged in {member}")
        with torch.serialization.safe_globals(HARMLESS), warnings.catch_warnings(action="ignore"):
            return torch.load(path, weights_only=True, map_location="cpu")
    except BadInput:
        raise
    except PermissionError as error:
        raise BadInput(flag, path, f"{what} that can be read ({error.strerror})") from None
    except Exception as error:  # noqa: BLE001 - torch.load of a broken file raises whatever its parser meets
        runs_code = "GLOBAL " in str(error)  # a pickle that names a function or class of its own
        why = "cut short or no checkpoint at all" if not runs_code else "more than a state_dict: it would run code"
        raise BadInput(flag, path, f"{what}; it is {why}") from None


def read_weights(path: str, flag: str) -> dict[str, Tensor]:
    """The state dict in a user's file: bare, or inside a checkpoint of Lightning's or anyone's.

    Raises:
        BadInput: as `read_saved`, or the file holds no state dict, or one of other than dense tensors.
    """
    content = read_saved(path, flag)
    for key in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise BadInput(flag, path, "a file of weights; it holds no state dict")
    for key, value in content.items():
        if not isinstance(key, str):
            raise BadInput(flag, path, f"weights by their names; one is called {key!r}")
        if value.layout != torch.strided or value.is_meta:
            where = "on the meta device, without values"
            found = where if value.is_meta else f"in {value.layout}".replace("torch.", "")
            raise BadInput(flag, path, f"dense weights; {key} is {found}")
    return content


def load_weights(net: nn.Module, path: str, flag: str, partly: bool = False) -> list[str]:
    """Load a user's weights file into a net; a prefix such as `module.` around either of them is ignored.

    If `partly`, what the net does not have, or in another shape, is left out, and the net's others stay. Returns lines
    that name both.

    Raises:
        BadInput: the file can't be read, or its weights, or if `partly` all of them, don't fit the net.
    """
    weights, own = read_weights(path, flag), net.state_dict()
    wrapper = _prefix(own)
    extra = _prefix(weights).removesuffix(wrapper)
    weights = {key.removeprefix(extra): value for key, value in weights.items()}
    if not any(key.startswith(wrapper) for key in weights):  # weights of the bare net
        weights = {wrapper + key: value for key, value in weights.items()}
    unused = tuple(getattr(net, "unused_weights", ()))  # keys in files of this architecture that the net ignores
    weights = {key: value for key, value in weights.items() if not key.startswith(unused)}
    told = {}
    if partly:
        given, weights = weights, {k: x for k, x in weights.items() if k in own and x.shape == own[k].shape}
        if not weights:
            raise BadInput(flag, path, f"weights of which some fit {type(net).__name__}; none does")
        told = {"not loaded": [*(given.keys() - weights)], "not in it": [key for key in own if key not in weights]}
        weights = {**own, **weights}
    check_weights(own, weights, path, flag, type(net).__name__)
    net.load_state_dict(weights)
    return [f"{what}: {_listed(sorted(keys))}" for what, keys in told.items() if keys]


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys[:LISTED]) + f" and {len(keys) - LISTED} more" * (len(keys) > LISTED)


def check_weights(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: str, flag: str, name: str = "the net"
) -> None:
    """Check that weights fit a net: the same keys and shapes, and finite floats for floats.

    Where the net's own state is infinite, such as in a mask, weights may be too.

    Raises:
        BadInput: they don't fit; the message names the keys.
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
        listed = "; ".join(f"{kind}: {_listed(keys)}" for kind, keys in faults.items() if keys)
        raise BadInput(flag, path, f"weights that fit {name}; {listed}")
    for key, value in weights.items():
        if not own[key].is_floating_point():
            continue
        if not value.is_floating_point():
            raise BadInput(flag, path, f"floats as weights; {key} is {str(value.dtype).removeprefix('torch.')}")
        if broken := int((own[key].cpu().isfinite() & ~value.float().isfinite()).sum()):
            found = f"{key} has {broken} of {value.numel()} that are NaN or infinite"
            raise BadInput(flag, path, f"finite weights; {found}")


def _prefix(keys: Iterable[str]) -> str:
    """The modules that all keys begin with, such as `module.`, or `net.` of a LightningModule around its net."""
    parts = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))
