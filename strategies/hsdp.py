"""Hybrid sharding: groups of ranks, each of which holds the whole model in parts."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strategies.fsdp import FSDP


class HSDP(FSDP):
    """FSDP within groups of ranks, such as the GPUs of one machine; gradients are averaged between the groups.

    Args:
        shard_size: ranks in a group, which follow one another.
        **kwargs: FSDP's.

    Raises:
        ValueError: an option's value can't be used, alone or with these devices.
    """

    def __init__(self, shard_size: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shard_size = shard_size

    def _check_devices(self) -> None:
        super()._check_devices()
        devices = self.num_processes * self.num_nodes
        if self.shard_size < 1 or devices % self.shard_size:
            expected = f"expected a number that divides the {devices} devices"
            raise ValueError(f"shard_size {self.shard_size}: {expected}")

    def _make_mesh(self) -> DeviceMesh:
        shape = self.world_size // self.shard_size, self.shard_size
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
