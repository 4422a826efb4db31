"""Keeps each stage's tensors on its rank; other ranks hold meta tensors."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apprentice.errors import BadInput
from strategies.base import checkpoints
from strategies.base.stages import tensors
from strategies.pipeline.runner import PipelineRunner


class StagePlacement:
    """Places a module's tensors on the ranks of a pipeline.

    A rank keeps its stages' parameters as the objects they are, with rank zero's values. Meta tensors stand in for the
    others, under the same names and in the same order: optimizers and checkpoints number parameters alike on all ranks.
    """

    def __init__(self, module: nn.Module, runner: PipelineRunner) -> None:
        self.group, self.device, self.rank = runner.group, runner.device, runner.rank
        self.owners: dict[Tensor, int] = {}  # rank in the pipeline; a tensor that is missing lives on all ranks
        for stage, rank in zip(runner.modules, runner.rank_of, strict=True):
            self.owners |= {tensor: rank for part in stage for _, tensor in tensors(part)}
        self._names: dict[str, Tensor] = {}
        self._slots: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for prefix, m in module.named_modules(remove_duplicate=False):
            for name, tensor in [*m._parameters.items(), *m._buffers.items()]:
                if tensor is not None:
                    self._names[f"{prefix}.{name}".removeprefix(".")] = tensor
                    self._slots.setdefault(tensor, []).append((m, name))
        self._distribute()

    def _is_here(self, tensor: Tensor) -> bool:
        return self.owners.get(tensor, self.rank) == self.rank

    @torch.no_grad()
    def _distribute(self) -> None:
        """Copy rank zero's values to where they belong, and put stand-ins elsewhere."""
        for tensor, slots in self._slots.items():
            stand_in = torch.empty_like(tensor, device="meta")
            values = _dense(tensor.detach().to(self.device))
            dist.broadcast(_bytes(values), 0)
            if self._is_here(tensor):
                tensor.data = values
                continue
            tensor.data = tensor.data.new_empty(0)
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, tensor.requires_grad)
            for m, name in slots:
                setattr(m, name, stand_in)

    def full_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Gather the module's state dict on the first rank's CPU, with its extra states; empty on others; collective.

        BadInput if a tensor has another name in `state`, this rank's state dict, than in the module.
        """
        unknown = [k for k, v in state.items() if k not in self._names and isinstance(v, Tensor) and v.is_meta]
        if unknown:
            raise BadInput("", "state_dict", f"parameters under their own names; {unknown[0]} is none's")
        owners = {key: self.owners.get(tensor, 0) for key, tensor in self._names.items()}
        local = {k: v.detach() for k, v in state.items() if isinstance(v, Tensor) and owners.get(k, 0) == self.rank}
        full = checkpoints.gather_states({"state": local}, self.group)
        return {key: full["state"].get(key, value) for key, value in state.items()} if full else {}

    def local_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Replace other ranks' tensors in a whole state dict by stand-ins."""
        elsewhere = {key for key, tensor in self._names.items() if not self._is_here(tensor)}
        return {key: value.to("meta") if key in elsewhere else value for key, value in state.items()}

    def restore(self, gather: bool) -> None:
        """Put the module's own tensors back: all of them, on the CPU, if all ranks `gather`; else others' are empty."""
        try:
            self._restore(gather)
        except RuntimeError:  # other ranks don't come: meta tensors would hide that behind another error
            self._restore(gather=False)
            raise

    @torch.no_grad()
    def _restore(self, gather: bool) -> None:
        for tensor, slots in self._slots.items():
            current = getattr(*slots[0])  # another object if a hook replaced it
            if self._is_here(tensor):
                tensor.data = _dense(current.detach())
            elif gather:
                tensor.data = torch.empty_like(current, device=self.device)
            for m, name in slots:
                setattr(m, name, tensor)
            if gather:
                if tensor in self.owners:
                    dist.broadcast(_bytes(tensor.data), group=self.group, group_src=self.owners[tensor])
                tensor.data = tensor.data.cpu()


def _dense(x: Tensor) -> Tensor:
    """Return the tensor without gaps in memory, in any order of its dimensions."""
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else torch.empty_like(x).copy_(x)


def _bytes(x: Tensor) -> Tensor:
    """Return a dense tensor's memory as a vector of bytes, which collectives accept for any type."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
