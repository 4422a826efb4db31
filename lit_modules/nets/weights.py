"""Loading of a user's weights file into a net, whatever wraps either of them."""

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.private import tree_leaves
from apprentice.weights import check_weights, list_keys, read_saved
from lit_modules.nets.base import Net
from lit_modules.nets.published_names import fits, identify_published, rename_published

SETS = ("state_dict", "model_state_dict", "model", "net")  # keys of weights in a checkpoint
# Keys of their moving averages.
AVERAGED = re.compile(r"(^|_)(ema|swa|avg|average|averaged)(_|$)", re.IGNORECASE)
CURRENT = "current_model_state"  # beside the averages that Lightning's `WeightAveraging` calls `state_dict`
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
COUNTERS = {"n_averaged", "total_ops", "total_params"}  # of `AveragedModel`, and of a counter of operations
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")  # in torchvision's files


def read_weights(path: str, flag: str) -> dict[str, Tensor]:
    """Read the state dict in a user's file: bare, or inside a checkpoint.

    Raises:
        BadInput: as `read_saved`; the file holds no state dict, two of them, or one of other than dense tensors.
    """
    weights, sets = _read_set(path, flag)
    if sets:
        raise BadInput(
            flag, path, f"one set of weights; it has {' and '.join(sets)}, of which `teacher_ckpt` takes one"
        )
    return weights


def _read_set(path: str, flag: str, averaged: bool | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Read one set of weights in a file; return also the names of both sets, the read one first, if it has averages."""
    content = read_saved(path, flag)
    current, average = _set_names(content)
    if averaged and not average:
        raise BadInput(flag, path, "averaged weights beside the others, as state_dict_ema or model_ema; it has none")
    default = "state_dict" if current == CURRENT else current or average
    chosen = default if averaged is None else average if averaged else current or average
    content = content[chosen] if chosen else content
    for key in SETS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise BadInput(flag, path, "a file of weights; it holds no state dict")
    for key, value in content.items():
        if not isinstance(key, str):
            raise BadInput(flag, path, f"weights by their names; one is called {key!r}")
        if value.layout != torch.strided or value.is_meta:
            layout = str(value.layout).removeprefix("torch.")
            fault = "on the meta device, without values" if value.is_meta else f"in {layout}"
            raise BadInput(flag, path, f"dense weights; {key} is {fault}")
    return content, sorted([current, average], key=lambda name: name != chosen) if current and average else []


def _set_names(content: Any) -> tuple[str | None, str | None]:
    """Return the keys of a checkpoint's weights and of their moving averages; None for what it lacks."""
    if not isinstance(content, dict):
        return None, None
    names = [key for key, value in content.items() if isinstance(key, str) and isinstance(value, dict)]
    if CURRENT in names:
        return CURRENT, "state_dict"
    averages = (key for key in names if AVERAGED.search(key) and any(map(torch.is_tensor, tree_leaves(content[key]))))
    return next((key for key in SETS if key in names), None), next(averages, None)


def load_weights(net: nn.Module, path: str, flag: str, partly: bool = False, averaged: bool | None = None) -> list[str]:
    """Load a user's weights file into a net; return lines that name what was left out.

    Wrappers around the net or around the weights, and older names of layers that torch accepts, do not matter. `flag`
    is the argument that names the file. If `partly`, weights that the net lacks or has in another shape are left out,
    and others of the net's stay. `averaged` chooses one of two sets, such as `model` and its moving averages
    `model_ema`; by default the one called `state_dict`, `model_state_dict`, `model` or `net`, and a line names the
    choice.

    Raises:
        BadInput: the file can't be read, or its weights, or if `partly` all of them, don't fit the net.
    """
    read, sets = _read_set(path, flag, averaged)
    unused = getattr(net, "unused_weights", ())  # keys in files of this architecture that the net ignores
    weights, state = match_names(net, read, unused), net.state_dict()
    left_out = dict[str, list[str]]()
    if partly:
        fitting = {key: x for key, x in weights.items() if key in state and x.shape == state[key].shape}
        if not fitting:
            raise BadInput(flag, path, f"weights of which some fit {type(net).__name__}; none does")
        left_out = {"not loaded": sorted(weights.keys() - fitting), "not in it": sorted(state.keys() - fitting)}
        weights = {**state, **fitting}
    elif not fits(state, weights) and (theirs := identify_published(_strip_prefix(read))):
        raise BadInput(flag, path, f"weights that fit this {type(net).__name__}; they are those of {theirs}")
    check_weights(state, weights, path, flag, type(net).__name__)
    load_checked(net, weights)
    which = [f"of two sets of weights {sets[0]} is loaded, not {sets[1]}"] if sets else []
    return [*which, *(f"{what}: {list_keys(keys)}" for what, keys in left_out.items() if keys)]


def load_backbone(
    net: nn.Module, weights: Mapping[str, Tensor], head: str, name: str, unused: Sequence[str] = ()
) -> bool:
    """Load weights into a net; those of its head, a child, stay new if their shapes differ. Returns whether all fit.

    `unused` are prefixes of keys that the net ignores; `name` is the value of `weights` in messages. BadInput if
    weights beside the head's don't fit.
    """
    state, has_head = net.state_dict(), True
    matched = match_names(net, weights, unused)
    for key, value in matched.items():
        if key.startswith(f"{head}.") and key in state and value.shape != state[key].shape:
            matched[key], has_head = state[key], False
    check_weights(state, matched, name, "weights", type(net).__name__)
    load_checked(net, matched)
    return has_head


def plain_state(net: nn.Module) -> dict[str, Tensor]:
    """Return a net's state; that of a wrapper has the names of the net inside, such as torchvision's."""
    prefix = f"{net.inner}." if isinstance(net, Net) and net.inner else ""
    return {key.removeprefix(prefix): value for key, value in net.state_dict().items()}


def full_names(net: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the net's own names, if they have those of the plain net inside, as in `plain_state`."""
    names = dict(zip(plain_state(net), net.state_dict(), strict=True))
    if any(key in weights for key in net.state_dict()):
        return {**weights}
    return {names.get(key, key): value for key, value in weights.items()}


def load_checked(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights, marked as of the layers' current versions, on which some of torchvision's layers insist."""
    state, current = cast("tuple[Any, Any]", (OrderedDict(weights), net.state_dict()))
    state._metadata = current._metadata
    net.load_state_dict(state)


def match_names(net: nn.Module, weights: Mapping[str, Tensor], unused: Sequence[str] = ()) -> dict[str, Tensor]:
    """Rename weights to the names that the net has for them; names that it does not know stay.

    Leaves out wrappers around the net or its parts, counters, and keys that begin with one of `unused`. Names of older
    versions of layers change as in torch's strict loading, and BatchNorm's count of batches may be missing.
    """
    state = net.state_dict()
    counters = COUNTERS - {key.rpartition(".")[2] for key in state}
    weights = {key: x for key, x in weights.items() if key.rpartition(".")[2] not in counters}
    names = {_strip_wrappers(key, state): key for key in state}
    weights = {_strip_wrappers(key, weights): x for key, x in weights.items()}
    weights = rename_published(net, _strip_prefix(weights)) or weights
    wrapper = _prefix(names)
    extra = _prefix_in(weights, {name.removeprefix(wrapper) for name in names})
    weights = {wrapper + key.removeprefix(extra) if key.startswith(extra) else key: x for key, x in weights.items()}
    weights = {names.get(key, key): x for key, x in weights.items() if not key.startswith(tuple(unused))}
    weights = {key if key in state else OLD_DENSENET.sub(r"\1\2", key): x for key, x in weights.items()}
    for key in state.keys() - weights.keys():
        if key.endswith("num_batches_tracked") and key.replace("num_batches_tracked", "running_mean") in weights:
            weights[key] = state[key]
    return weights if weights.keys() == state.keys() else _upgrade_names(net, weights)


def _upgrade_names(net: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights as the net's layers rename those of their older versions, if all names fit then."""
    state, trial = net.state_dict(), copy.deepcopy(net).to("meta")
    reshaped = {key: x for key, x in weights.items() if key in state and x.shape != state[key].shape}
    with suppress(RuntimeError, ValueError):  # they do not fit, or a layer asks for its version
        trial.load_state_dict({**weights, **{key: state[key] for key in reshaped}}, assign=True)
        return {**trial.state_dict(), **reshaped}
    return weights


def _strip_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the modules with which all keys begin."""
    prefix = _prefix(weights)
    return {key.removeprefix(prefix): x for key, x in weights.items()}


def _strip_wrappers(key: str, keys: Mapping[str, Any]) -> str:
    """Remove the names of wrappers from a key, unless the result is another key."""
    bare = ".".join(part for part in key.split(".") if part not in WRAPPERS)
    return key if bare in keys else bare


def _prefix(keys: Iterable[str]) -> str:
    """Return the modules with which all keys begin, such as the `model.` of a net around another one."""
    parts = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _prefix_in(keys: Iterable[str], names: Collection[str]) -> str:
    """Return the prefix of most of the names in the keys, such as `net.` of a LightningModule around its net."""
    counts = Counter[str]()
    for key in keys:
        starts = [0, *(match.end() for match in re.finditer(r"\.", key))]
        counts.update(key[:start] for start in starts if key[start:] in names)
    return max(counts, key=lambda prefix: counts[prefix], default="")
