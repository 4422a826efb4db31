"""A user's files of weights and the nets that they are for, whatever names either of them uses."""

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.private import tree_leaves
from apprentice.weights import check_weights, listed, read_saved

SETS = ("state_dict", "model_state_dict", "model", "net")  # what the weights are called in a checkpoint
# What their moving averages are called, beside them.
AVERAGED = re.compile(r"(^|_)(ema|swa|avg|average|averaged)(_|$)", re.IGNORECASE)
CURRENT = "current_model_state"  # beside the averages that Lightning's `WeightAveraging` calls `state_dict`
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
COUNTERS = {"n_averaged", "total_ops", "total_params"}  # of `AveragedModel`, and of a counter of operations
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")  # in torchvision's files


def read_weights(path: str, flag: str) -> dict[str, Tensor]:
    """The state dict in a user's file: bare, or inside a checkpoint of Lightning's or anyone's.

    Raises:
        BadInput: as `read_saved`, or the file holds no state dict, one of other than dense tensors, or two.
    """
    weights, sets = _read_set(path, flag)
    if sets:
        raise BadInput(
            flag, path, f"one set of weights; it has {' and '.join(sets)}, of which --teacher_ckpt takes one"
        )
    return weights


def _read_set(path: str, flag: str, averaged: bool | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """One set of the weights in a file; the names of both if it has averages too, that of the one read first."""
    content = read_saved(path, flag)
    usual, average = _set_names(content)
    if averaged and not average:
        raise BadInput(flag, path, "averaged weights beside the others, as state_dict_ema or model_ema; it has none")
    main = "state_dict" if usual == CURRENT else usual or average
    taken = main if averaged is None else average if averaged else usual or average
    content = content[taken] if taken else content
    for key in SETS:
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
    return content, sorted([usual, average], key=lambda name: name != taken) if usual and average else []


def _set_names(content: Any) -> tuple[str | None, str | None]:
    """What a checkpoint calls its weights, and their moving averages; None for what it has not."""
    if not isinstance(content, dict):
        return None, None
    names = [key for key, value in content.items() if isinstance(key, str) and isinstance(value, dict)]
    if CURRENT in names:
        return CURRENT, "state_dict"
    averages = (key for key in names if AVERAGED.search(key) and any(map(torch.is_tensor, tree_leaves(content[key]))))
    return next((key for key in SETS if key in names), None), next(averages, None)


def load_weights(net: nn.Module, path: str, flag: str, partly: bool = False, averaged: bool | None = None) -> list[str]:
    """Load a user's weights file into a net, whatever wraps either of them, and by whatever names torch takes.

    If `partly`, what the net does not have, or in another shape, is left out, and the net's others stay. Returns lines
    that name both.

    Of a checkpoint with two sets of weights, such as `model` and their moving averages `model_ema`, `averaged` says
    which is loaded, and a line does; default: what is called `state_dict`, `model_state_dict`, `model` or `net`.

    Raises:
        BadInput: the file can't be read, or its weights, or if `partly` all of them, don't fit the net.
    """
    read, sets = _read_set(path, flag, averaged)
    unused = getattr(net, "unused_weights", ())  # keys in files of this architecture that the net ignores
    weights, own = named_as_in(net, read, unused), net.state_dict()
    left_out = dict[str, list[str]]()
    if partly:
        fitting = {key: x for key, x in weights.items() if key in own and x.shape == own[key].shape}
        if not fitting:
            raise BadInput(flag, path, f"weights of which some fit {type(net).__name__}; none does")
        left_out = {"not loaded": sorted(weights.keys() - fitting), "not in it": sorted(own.keys() - fitting)}
        weights = {**own, **fitting}
    check_weights(own, weights, path, flag, type(net).__name__)
    load_checked(net, weights)
    which = [f"of two sets of weights {sets[0]} is loaded, not {sets[1]}"] if sets else []
    return [*which, *(f"{what}: {listed(keys)}" for what, keys in left_out.items() if keys)]


def load_checked(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights that have the names of this version of the net's layers, which some of torchvision's ask for."""
    state: Any = OrderedDict(weights)
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    net.load_state_dict(state)


def named_as_in(net: nn.Module, weights: Mapping[str, Tensor], unused: Sequence[str] = ()) -> dict[str, Tensor]:
    """Weights by the names that the net has for them; those that it does not know keep theirs.

    Wrappers around the net or its parts, counters, and keys that begin as `unused` are left out. Names that layers had
    in older versions change as torch's strict loading changes them, and BatchNorm's count of batches may be missing.
    """
    own = net.state_dict()
    weights = {key: x for key, x in weights.items() if key.rpartition(".")[2] not in COUNTERS - _last_names(own)}
    names, weights = {_unwrapped(key, own): key for key in own}, {_unwrapped(k, weights): x for k, x in weights.items()}
    wrapper = _prefix(names)
    extra = _prefix_in(weights, {name.removeprefix(wrapper) for name in names})
    weights = {
        wrapper + key.removeprefix(extra) if key.startswith(extra) else key: value for key, value in weights.items()
    }
    weights = {names.get(key, key): value for key, value in weights.items() if not key.startswith(tuple(unused))}
    weights = {key if key in own else OLD_DENSENET.sub(r"\1\2", key): value for key, value in weights.items()}
    for key in own.keys() - weights.keys():
        if key.endswith("num_batches_tracked") and key.replace("num_batches_tracked", "running_mean") in weights:
            weights[key] = own[key]
    return weights if weights.keys() == own.keys() else _upgraded(net, weights)


def _upgraded(net: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as the net's layers rename those of their older versions; the same if their names do not fit then."""
    own, tried = net.state_dict(), copy.deepcopy(net).to("meta")
    others = {key: x for key, x in weights.items() if key in own and x.shape != own[key].shape}
    with suppress(RuntimeError, ValueError):  # they do not fit, or a layer asks for its version
        tried.load_state_dict({**weights, **{key: own[key] for key in others}}, assign=True)
        return {**tried.state_dict(), **others}
    return weights


def _unwrapped(key: str, keys: Mapping[str, Any]) -> str:
    """The key without the names of wrappers, unless that is another key."""
    bare = ".".join(part for part in key.split(".") if part not in WRAPPERS)
    return key if bare in keys else bare


def _last_names(keys: Iterable[str]) -> set[str]:
    return {key.rpartition(".")[2] for key in keys}


def _prefix(keys: Iterable[str]) -> str:
    """The modules that all keys begin with, such as the `model.` of a net around another one."""
    parts = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _prefix_in(keys: Iterable[str], names: Collection[str]) -> str:
    """What stands before most of the names in the keys, such as `net.` of a LightningModule around its net."""
    counts = Counter[str]()
    for key in keys:
        starts = [0, *(match.end() for match in re.finditer(r"\.", key))]
        counts.update(key[:start] for start in starts if key[start:] in names)
    return max(counts, key=lambda prefix: counts[prefix], default="")
