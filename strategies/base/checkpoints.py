"""Sharded states in the layout of one device: any strategy on any number of devices goes on from them."""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def whole(shards: DTensor) -> Tensor:
    """All of a sharded tensor; every rank has to ask, for the same tensors in the same order."""
    with torch.no_grad():
        near = cast("DTensor", shards.to(shards.device_mesh.device_type))  # offloaded ones are on the CPU
        return near.full_tensor()


def sharded(value: Any, like: Any) -> Any:
    """A whole tensor cut and placed like one that is sharded; anything else is left as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # Each rank has read the whole, and cuts its part without the others.
    return distribute_tensor(value.detach().contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def collected(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """What a module's or an optimizer's `state_dict()` would be on one device, on the CPU; every rank has to ask.

    Args:
        state: with sharded tensors.
        keep: whether this rank wants it; the others get an empty one, and hold one whole tensor at a time.
    """
    found = tree_map_only(DTensor, lambda shards: whole(shards).cpu() if keep else whole(shards)[:0], state)
    return found if keep else {}


def gathered(state: dict[str, Any], keep: bool, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """An optimizer's whole `state_dict()`, where each rank has the states of some parameters; every rank has to ask.

    Args:
        state: this rank's.
        keep: whether this rank wants the whole; only the group's first can.
        group: ranks that have the whole between them; None: all.
    """
    if not dist.is_initialized():  # where the ranks were forked, whose states have come together
        return state if keep else {}
    here = move_data_to_device(state["state"], torch.device("cpu"))
    parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(here, parts, group=group, group_dst=0)
    whole = {index: values for part in parts or [] for index, values in sorted(part.items())}
    return {**state, "state": dict(sorted(whole.items()))} if keep else {}


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state of one device into a sharded module."""
    own = module.state_dict()
    module.load_state_dict({key: sharded(value, own.get(key)) for key, value in state.items()}, strict=strict)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state of one device into the optimizer of a sharded module.

    A tensor of its parameter's shape, as Adam's moments, is sharded as the parameter is; others are whole on all ranks.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = dict(zip(numbers, parameters, strict=False))  # torch says it if their numbers differ
    states = {n: {key: sharded(v, own.get(n)) for key, v in kept.items()} for n, kept in state["state"].items()}
    optimizer.load_state_dict({**state, "state": states})
