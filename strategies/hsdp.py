"""Hybrid sharding: each group of ranks shards a whole model."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from apprentice.errors import BadInput
from strategies.fsdp import FSDP


class HSDP(FSDP):
    """FSDP within groups of ranks, such as the GPUs of one machine; gradients are averaged between the groups.

    Args:
        shard_size: consecutive ranks in a group.
    """

    def __init__(self, shard_size: int = 2, **kwargs: Any) -> None:
        if (mesh := kwargs.get("mesh")) is not None:
            raise BadInput("mesh", mesh, "not allowed, as shard_size makes the groups; fsdp takes a mesh")
        super().__init__(**kwargs)
        self.shard_size = shard_size

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.shard_size < 1 or self._num_ranks % self.shard_size:
            raise BadInput("shard_size", self.shard_size, f"a number that divides the {self._num_ranks} devices")

    def _make_mesh(self) -> DeviceMesh:
        shape = self.world_size // self.shard_size, self.shard_size
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
