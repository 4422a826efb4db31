"""Weights files: reading without running code, and checking keys, shapes and values against a net."""

import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apprentice.errors import BadInput

BROKEN = "cut short or no checkpoint at all"
LISTED = 20  # keys in a message, of a kind
FEW = 3  # names in a warning
# What weights files hold beside tensors, and torch takes for code: settings of a script, numbers of numpy.
_SCALAR = np.float64(0).__reduce__()[0]
HARMLESS: list[Any] = [
    Namespace, type(Path()), np.dtype, *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]  # fmt: skip


def read_saved(path: str | Path, flag: str, what: str = "a file of weights") -> Any:
    """Read what torch saved in a user's file, to the CPU; never run code in it. `flag` is the argument that names it.

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
        runs_code = "GLOBAL " in str(error)  # a pickle that names a function or a class
        why = "more than a state_dict: it would run code; save net.state_dict()" if runs_code else BROKEN
        raise BadInput(flag, path, f"{what}; it is {why}") from None


def list_keys(keys: Sequence[str], most: int = LISTED) -> str:
    """Return the first keys, and the number of others, as text."""
    return ", ".join(keys[:most]) + f" and {len(keys) - most} more" * (len(keys) > most)


def check_weights(
    state: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: str, flag: str, name: str = "the net"
) -> None:
    """Check that weights fit a net's state: the same keys and shapes, and finite floats for floats.

    Where the state is infinite, such as in a mask, weights may be too.

    Raises:
        BadInput: they don't fit; the message names the keys.
    """
    faults = {
        "missing": [key for key in state if key not in weights],
        "unknown": [key for key in weights if key not in state],
        "of another shape": [
            f"{key} {tuple(value.shape)}, not {tuple(state[key].shape)}"
            for key, value in weights.items() if key in state and value.shape != state[key].shape
        ],
    }  # fmt: skip
    if any(faults.values()):
        named = "; ".join(f"{kind}: {list_keys(keys)}" for kind, keys in faults.items() if keys)
        raise BadInput(flag, path, f"weights that fit {name}; {named}")
    for key, value in weights.items():
        if not state[key].is_floating_point():
            continue
        if not value.is_floating_point():
            raise BadInput(flag, path, f"floats as weights; {key} is {str(value.dtype).removeprefix('torch.')}")
        if broken := int((state[key].cpu().isfinite() & ~value.float().isfinite()).sum()):
            counts = f"{broken} of {value.numel()} that are NaN or infinite"
            raise BadInput(flag, path, f"finite weights; {key} has {counts}")
