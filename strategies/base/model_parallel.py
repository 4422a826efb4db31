"""A module split over several devices of one process, as in PyTorch's tutorial "Single-Machine Model Parallel"."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput
from apprentice.weights import FEW, list_keys
from strategies.base.stages import apply_modules, batch_norms, group_modules, sizes_by_parameters

PLAIN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}


class ModelParallel(nn.Module):
    """Stages of a module, one after another, each on its own device.

    Inputs may be on any device; the output is on the last one, where labels have to be too. Under a plain Trainer, name
    that GPU (`Trainer(devices=[1])` for "cuda:0" and "cuda:1"). `strategies.DDP` moves batches there, and
    `Trainer(devices=...)` counts processes: each takes as many GPUs as the module has stages.

    The state dict is that of `nn.Sequential(*stages)` on any devices. It holds the modules themselves, not copies.

    Args:
        stages: the modules; a tuple as input becomes several arguments.
        devices: of the stages; `to` and `cpu` don't move them. Fewer devices than stages take several stages each, with
            about as many parameters on each device. None: all stages go where the module goes; under
            `strategies.DDP` process r of a node puts its n stages on the GPUs n r, n r + 1, ...
        split_size: rows of a micro-batch, so that all devices compute at the same time. None: the batch stays
            whole, and one device computes at a time.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        devices: Sequence[torch.device | str] | None = None,
        split_size: int | None = None,
    ) -> None:
        super().__init__()
        if not stages:
            raise BadInput("stages", "[]", "at least one module")
        if split_size is not None and split_size < 1:
            raise BadInput("split_size", split_size, "at least 1")
        for number, stage in enumerate(stages):
            self.add_module(str(number), stage)
        self.split_size = split_size
        self.place(devices)
        if split_size is not None and (listed := batch_norms(self)):
            advice = "GroupNorm's numbers are those of the whole batch"
            rank_zero_warn(f"{list_keys(listed, FEW)}: BatchNorm sees {split_size} rows, not the batch; {advice}")

    def place(self, devices: Sequence[torch.device | str] | None) -> None:
        """Move the stages to these devices and keep them there; None: they stay until the module is moved."""
        stages = self._stages()
        if devices is not None and not 0 < len(devices) <= len(stages):
            raise BadInput("devices", [str(d) for d in devices], f"one to {len(stages)}, one for each stage")
        self._sizes = [1] * len(stages) if devices is None else sizes_by_parameters(stages, range(len(devices)))
        numbers = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        owners: dict[Tensor, tuple[int, str]] = {}
        parameters, buffers = self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False)
        for name, tensor in itertools.chain(parameters, buffers):
            number = numbers[int(name.partition(".")[0])]
            first, key = owners.setdefault(tensor, (number, name))
            if first != number:
                places = f"{key} of stage {first} is {name} of stage {number}"
                raise BadInput("", "stages", f"that a weight belongs to one stage; {places}")
        self.devices = None if devices is None else [torch.device(device) for device in devices]
        self._apply(lambda tensor: tensor)

    @property
    def num_stages(self) -> int:
        """The number of devices, or of stages if there are none."""
        return len(self._sizes)

    def _stages(self) -> list[nn.Module]:
        """Return the modules now: others may replace some, such as SyncBatchNorm's conversion."""
        return [module for module in self._modules.values() if module is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelParallel":
        """Implements `to`, `double`, `cpu` and so on: stages that have devices stay there."""
        if self.devices is None:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's has no hints
            return self
        for device, group in zip(self.devices, group_modules(self._stages(), self._sizes), strict=True):
            for module in group:
                module._apply(lambda tensor, device=device: fn(tensor).to(device))
        return self

    def gathering_layers(self) -> list[str]:
        """Return the names of the layers that compute over all ranks: BatchNorm other than torch's plain one."""
        layers = {name: self.get_submodule(name) for name in batch_norms(self)}
        return [name for name, layer in layers.items() if type(layer) not in PLAIN]

    def forward(self, *inputs: Tensor) -> Any:
        """Return the last stage's output, on the last device; each stage returns a tensor or a tuple of tensors."""
        if self.split_size is None:
            x: Any = inputs
            for stage in range(self.num_stages):
                x = self._compute(stage, x)
            return x
        # One empty span for an empty batch, which a rank can have.
        rows = len(inputs[0])
        spans = list(itertools.pairwise([*range(0, rows, self.split_size), rows])) or [(0, 0)]
        noises = [keyed.slice_rows(start, stop) for start, stop in spans]
        pieces: list[Any] = [tuple(x[start:stop] for x in inputs) for start, stop in spans]
        for split, stage in in_turn(len(pieces), self.num_stages):
            with noises[split]():
                pieces[split] = self._compute(stage, pieces[split])
        return _join(pieces, spans)

    def _compute(self, stage: int, x: Any) -> Any:
        if self.devices is not None:
            device = self.devices[stage]
            x = tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)
        x = apply_modules(group_modules(self._stages(), self._sizes)[stage], x)
        wrong = [type(t).__name__ for t in (x if type(x) is tuple else (x,)) if not isinstance(t, Tensor)]
        if wrong:
            raise BadInput("", f"stage {stage}", f"a tensor or a tuple of tensors as its output, got {wrong[0]}")
        return x

    def extra_repr(self) -> str:
        devices = None if self.devices is None else [str(device) for device in self.devices]
        return f"devices={devices}, split_size={self.split_size}"


def in_turn(splits: int, stages: int) -> Iterator[tuple[int, int]]:
    """Micro-batch and stage of each computation, in the order in which they are queued on the GPUs."""
    for tick in range(splits + stages - 1):
        for stage in reversed(range(stages)):  # a copy to a device waits for all that is queued there
            if 0 <= tick - stage < splits:
                yield tick - stage, stage


def devices_of(process: int, stages: int, devices: Sequence[torch.device], gpus: int) -> list[torch.device]:
    """Return the devices of a node's process, one for each stage of its module.

    Lightning has chosen `devices`, one for each process; BadInput if there are too few `gpus`, or gaps.
    """
    if devices[0].type != "cuda":
        return [devices[process]] * stages
    chosen, needed = [device.index for device in devices], stages * len(devices)
    if chosen != list(range(len(devices))):
        raise BadInput("devices", chosen, f"a number of processes, which take {stages} GPUs each in order")
    if needed > gpus:
        expected = f"{needed} GPUs, {stages} for the stages of each process"
        raise BadInput("devices", len(devices), f"{expected}; there are {gpus}")
    return [torch.device("cuda", stages * process + stage) for stage in range(stages)]


def _join(outputs: list[Any], spans: list[tuple[int, int]]) -> Any:
    for output, (start, stop) in zip(outputs, spans, strict=True):
        shapes = [tuple(x.shape) for x in (output if isinstance(output, tuple) else (output,))]
        if wrong := [shape for shape in shapes if shape[:1] != (stop - start,)]:
            raise BadInput("", "split_size", f"outputs with the input's {stop - start} rows first, got {wrong[0]}")
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
    return torch.cat(outputs)
