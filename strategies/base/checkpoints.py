"""Sharded states to and from the layout of one device, which any strategy on any number of devices can load."""

from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only


def whole(shards: DTensor) -> Tensor:
    """The whole of a sharded tensor; collective."""
    with torch.no_grad():
        on_device = cast("DTensor", shards.to(shards.device_mesh.device_type))  # offloaded shards are on the CPU
        return on_device.full_tensor()


def sharded(value: Any, like: Any) -> Any:
    """A whole tensor, sharded like another one; anything else stays as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # Each rank has loaded the whole and takes its part without communication.
    return distribute_tensor(value.detach().contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def collected(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """A sharded `state_dict()` with whole tensors on the CPU, for ranks that `keep` it, else empty; collective."""
    # A rank that does not keep it holds one whole tensor at a time.
    found = tree_map_only(DTensor, lambda shards: whole(shards).cpu() if keep else whole(shards)[:0], state)
    return found if keep else {}


def gathered(state: dict[str, Any], keep: bool, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """An optimizer's whole `state_dict()`, where each rank of a group has the states of some parameters; collective.

    Only the group's first rank can `keep` it; the others get an empty one.
    """
    if not dist.is_initialized():  # in the process that has forked the ranks, and has the whole
        return state if keep else {}
    own = move_data_to_device(state["state"], torch.device("cpu"))
    parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(own, parts, group=group, group_dst=0)
    whole = {index: values for part in parts or [] for index, values in sorted(part.items())}
    return {**state, "state": dict(sorted(whole.items()))} if keep else {}
