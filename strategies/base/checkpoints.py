"""Sharded states to and from the layout of one device, which any strategy on any number of devices can load."""

from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from apprentice.private import tree_map_only


def gather_tensor(shards: DTensor, order: Tensor | None = None) -> Tensor:
    """Gather a sharded tensor; its row i becomes row `order[i]` of the result; collective."""
    with torch.no_grad():
        on_device = cast("DTensor", shards.to(shards.device_mesh.device_type))  # offloaded shards are on the CPU
        is_cut = [not placement.is_replicate() for placement in on_device.placements]
        values = _gather_twice(on_device) if sum(is_cut) > 1 else on_device.full_tensor()
        return values if order is None else torch.empty_like(values).index_copy_(0, order.to(values.device), values)


def _gather_twice(shards: DTensor) -> Tensor:
    """Gather a tensor that is cut along the second dimension of a mesh, with each part sharded along the first."""
    data, cut = (shards.device_mesh[name] for name in shards.device_mesh.mesh_dim_names or ())
    place = cast("Shard", shards.placements[1])
    shape = torch.Size(n // cut.size() if i == place.dim else n for i, n in enumerate(shards.shape))
    strides = torch.empty(shape, device="meta").stride()
    # torch does it in one call, which warns that it gathers twice.
    part = DTensor.from_local(shards.to_local(), data, [Shard(0)], run_check=False, shape=shape, stride=strides)
    return DTensor.from_local(part.full_tensor(), cut, [place], run_check=False).full_tensor()


def shard_like(value: Any, like: Any, order: Tensor | None = None) -> Any:
    """Shard a whole tensor like another one, whose row i is row `order[i]` of it; return anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    value = value.detach() if order is None else value.detach()[order.to(value.device)]
    # Each rank has loaded the whole and takes its part without communication.
    return distribute_tensor(value.contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def gather_tree(tree: Any, keep: bool, order: Tensor | None = None) -> Any:
    """Gather a tree's sharded tensors on the CPU, without rows on ranks that do not `keep` them; collective."""
    # A rank that does not keep them holds one whole tensor at a time.
    return tree_map_only(DTensor, lambda x: gather_tensor(x, order).cpu() if keep else gather_tensor(x)[:0], tree)


def gather_states(state: dict[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Gather an optimizer's `state_dict()` from a group whose ranks have the states of some parameters; collective.

    The group's first rank gets it; the others get an empty one.
    """
    if not dist.is_initialized():  # in the process that has forked the ranks, and has the whole
        return state
    local_states = move_data_to_device(state["state"], torch.device("cpu"))
    parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(local_states, parts, group=group, group_dst=0)
    if parts is None:
        return {}
    states = {index: values for part in parts for index, values in part.items()}
    return {**state, "state": dict(sorted(states.items()))}
