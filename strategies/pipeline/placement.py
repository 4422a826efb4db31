"""Where the tensors of a module live that is cut into stages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.base.stages import tensors


class StagePlacement:
    """Where a module's tensors live: what a rank does not compute with is on the meta device there.

    Parameters stay the objects they are where they live; elsewhere others stand in for them, under the same names and
    in the same order, so that optimizers and checkpoints count alike on all ranks.

    Args:
        module: the same on all ranks; rank zero's values are those that count.
        stages: the modules of each stage.
        ranks: of each stage the rank in the pipeline that computes it.
        group: the ranks of this pipeline.
        device: where this rank computes.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[nn.Module]],
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.group, self.device = group, device
        self.owners: dict[Tensor, int] = {}  # rank in the pipeline; a tensor that is not here lives on all ranks
        for stage, rank in zip(stages, ranks, strict=True):
            self.owners |= {tensor: rank for part in stage for _, tensor in tensors(part)}
        self._places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for m in module.modules():
            for store in (m._parameters, m._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        self._places.setdefault(tensor, []).append((m, name))
        self._names = {
            prefix + ("." if prefix else "") + name: tensor
            for prefix, m in module.named_modules(remove_duplicate=False)
            for store in (m._parameters, m._buffers)
            for name, tensor in store.items()
            if tensor is not None
        }
        self._meta = {tensor: torch.empty_like(tensor, device="meta") for tensor in self.owners}
        self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Take rank zero's values, keep what is computed here, put stand-ins in the places of the rest."""
        here = dist.get_rank(self.group)
        for tensor, places in self._places.items():
            values = _dense(tensor.detach().to(self.device))
            dist.broadcast(_flat(values), 0)
            if self.owners.get(tensor, here) == here:
                tensor.data = values
                continue
            tensor.data = tensor.data.new_empty(0)
            stand_in: Tensor = self._meta[tensor]
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, tensor.requires_grad)
            self._put(places, stand_in)

    @staticmethod
    def _put(places: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
        for m, name in places:
            setattr(m, name, tensor)

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The module's state dict as on one device, on the first rank of the pipeline; every rank has to ask.

        What is no parameter or buffer, such as an extra state, is the first rank's own.

        Args:
            state: this rank's, with stand-ins.

        Returns:
            The whole state on the CPU; on other ranks an empty one.

        Raises:
            ValueError: a tensor has another name there than in the module.
        """
        strange = [k for k, v in state.items() if k not in self._names and isinstance(v, Tensor) and v.is_meta]
        if strange:
            raise ValueError(f"state_dict: expected parameters under their own names; {strange[0]} is none's")
        here = dist.get_rank(self.group)
        found: dict[str, Any] = {}
        for key, value in state.items():
            owner = self.owners.get(self._names[key], 0) if key in self._names else 0
            kept = self._sent(value, owner, 0) if owner != 0 and here in {0, owner} else value
            if here == 0:
                found[key] = kept.detach().cpu() if isinstance(kept, Tensor) else kept
        return found

    def _sent(self, value: Tensor, source: int, target: int) -> Tensor:
        if dist.get_rank(self.group) == source:
            dist.send(_flat(_dense(value.detach())), group=self.group, group_dst=target)
            return value
        received = torch.empty_like(value, device=self.device)
        dist.recv(_flat(received), group=self.group, group_src=source)
        return received

    def mine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole state dict, with stand-ins for what lives elsewhere."""
        here = dist.get_rank(self.group)
        elsewhere = {key for key, tensor in self._names.items() if self.owners.get(tensor, here) != here}
        return {key: value.to("meta") if key in elsewhere else value for key, value in state.items()}

    def give_up(self) -> None:
        """Put the module's own tensors back; those that live elsewhere are empty."""
        for tensor, places in self._places.items():
            self._put(places, tensor)

    @torch.no_grad()
    def undo(self) -> None:
        """Make the module whole again, on the CPU; every rank has to."""
        here = dist.get_rank(self.group)
        self.give_up()
        for tensor in self._places:
            owner = self.owners.get(tensor)
            if owner not in {here, None}:
                tensor.data = torch.empty_like(self._meta[tensor], device=self.device)
            if owner is not None:
                tensor.data = _dense(tensor.data)
                dist.broadcast(_flat(tensor.data), group=self.group, group_src=owner)
            tensor.data = tensor.data.cpu()


def _dense(x: Tensor) -> Tensor:
    """The tensor without gaps in memory, in whatever order its dimensions lie."""
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else torch.empty_like(x).copy_(x)


def _flat(x: Tensor) -> Tensor:
    """A dense tensor's memory as a vector of bytes, which collectives take of any type."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
