"""A module split over several devices of one process, as in PyTorch's tutorial "Single-Machine Model Parallel"."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from apprentice import keyed
from strategies.base.stages import chained, grouped, normalised, sizes_by_cost

PLAIN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}


class ModelParallel(nn.Module):
    """Stages of a module, one after another, each on a device of its own.

    Tensors may come from any device; the output is on the last one, and labels have to be there too. Under a plain
    Trainer, name that GPU (`Trainer(devices=[1])` for "cuda:0" and "cuda:1"); under `strategies.DDP` batches go there
    by themselves, and `Trainer(devices=...)` counts the processes: a process of a module of n stages takes n GPUs.

    The state dict is that of `nn.Sequential(*stages)`, whatever the devices. The stages are the modules that were
    given, not copies: a net that they are parts of has the weights that are trained here, under its own names.

    Args:
        stages: the modules; one whose input is a tuple gets it as several arguments.
        devices: where they stay, whatever `to` and `cpu` say. Fewer devices than stages take several each, about as
            many parameters on each device. When not given, all stages go where the module goes; under `strategies.DDP`
            process r of a node puts its n stages on the GPUs n r, n r + 1, ...
        split_size: rows of a micro-batch. All devices compute at the same time, each another part of the batch. When
            not given, the batch stays whole, and one device computes at a time.

    Raises:
        ValueError: a value can't be used, or two stages share a weight.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        devices: Sequence[torch.device | str] | None = None,
        split_size: int | None = None,
    ) -> None:
        super().__init__()
        if not stages:
            raise ValueError("stages []: expected at least one module")
        if split_size is not None and split_size < 1:
            raise ValueError(f"split_size {split_size}: expected at least 1")
        for number, stage in enumerate(stages):
            self.add_module(str(number), stage)
        self.split_size = split_size
        self.place(devices)
        if split_size is not None and (listed := normalised(self)):
            advice = "GroupNorm's numbers are those of the whole batch"
            rank_zero_warn(f"{', '.join(listed)}: BatchNorm sees {split_size} rows, not the batch; {advice}")

    # Where stages are

    def place(self, devices: Sequence[torch.device | str] | None) -> None:
        """Move the stages to these devices, to stay there; None: they stay where they are until the module is moved.

        Raises:
            ValueError: more devices than stages, or a weight that would be on two of them.
        """
        stages = self._stages()
        if devices is not None and not 0 < len(devices) <= len(stages):
            raise ValueError(f"devices {[str(d) for d in devices]}: expected one to {len(stages)}, one for each stage")
        costs = [sum(p.numel() for p in stage.parameters()) for stage in stages]
        self._sizes = [1] * len(stages) if devices is None else sizes_by_cost(costs, len(devices))
        self._check()
        self.devices = None if devices is None else [torch.device(device) for device in devices]
        self._apply(lambda tensor: tensor)

    @property
    def num_stages(self) -> int:
        """How many devices compute, or would."""
        return len(self._sizes)

    def _stages(self) -> list[nn.Module]:
        """The modules; asked for anew, as others may replace some (SyncBatchNorm's conversion)."""
        return [module for module in self._modules.values() if module is not None]

    def _groups(self) -> list[list[nn.Module]]:
        """The modules of each device."""
        return grouped(self._stages(), self._sizes)

    def _check(self) -> None:
        numbers = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        owners: dict[Tensor, tuple[int, str]] = {}
        parameters, buffers = self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False)
        for name, tensor in itertools.chain(parameters, buffers):
            number = numbers[int(name.partition(".")[0])]
            first, key = owners.setdefault(tensor, (number, name))
            if first != number:
                found = f"{key} of stage {first} is {name} of stage {number}"
                raise ValueError(f"stages: expected that a weight belongs to one stage; {found}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelParallel":
        """What `to`, `double`, `cpu` and their like do: stages that have devices stay there."""
        if self.devices is None:
            return super()._apply(fn, recurse)
        for device, group in zip(self.devices, self._groups(), strict=True):
            for module in group:
                module._apply(lambda tensor, device=device: fn(tensor).to(device))
        return self

    def gathering(self) -> list[str]:
        """Names of the layers that compute over all ranks: BatchNorm other than torch's plain one."""
        layers = {name: self.get_submodule(name) for name in normalised(self)}
        return [name for name, layer in layers.items() if type(layer) not in PLAIN]

    # Computing

    def forward(self, *inputs: Tensor) -> Any:
        """The last stage's output, a tensor or a tuple of tensors, on the last device.

        Raises:
            ValueError: what a stage gets is something else; or, of a batch that is split, an output has other rows.
        """
        if self.split_size is None:
            return self._outputs([inputs], [nullcontext])[0]
        spans = _spans(len(inputs[0]), self.split_size)
        pieces = [tuple(x[start:stop] for x in inputs) for start, stop in spans]
        return _joined(self._outputs(pieces, [keyed.part(start, stop) for start, stop in spans]), spans)

    def _outputs(self, pieces: list[Any], noises: Sequence[Callable[[], AbstractContextManager]]) -> list[Any]:
        for split, stage in in_turn(len(pieces), self.num_stages):
            with noises[split]():
                pieces[split] = self._computed(stage, pieces[split])
        return pieces

    def _computed(self, stage: int, x: Any) -> Any:
        if self.devices is not None:
            device = self.devices[stage]
            x = tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)
        x = chained(self._groups()[stage], x)
        wrong = [type(t).__name__ for t in (x if type(x) is tuple else (x,)) if not isinstance(t, Tensor)]
        if wrong:
            raise ValueError(f"stage {stage}: expected a tensor or a tuple of tensors as its output, got {wrong[0]}")
        return x

    def extra_repr(self) -> str:  # noqa: D102
        devices = None if self.devices is None else [str(device) for device in self.devices]
        return f"devices={devices}, split_size={self.split_size}"


def in_turn(splits: int, stages: int) -> Iterator[tuple[int, int]]:
    """Split and stage of each computation, in the order in which GPUs are told of them; they don't wait in between.

    In tick t stage s computes split t - s. The last stage is told first: a copy to its device waits for all that this
    device has been told before, and then stage 1 goes on with split k + 1 while stage 2 has split k.
    """
    for tick in range(splits + stages - 1):
        for stage in reversed(range(stages)):
            if 0 <= tick - stage < splits:
                yield tick - stage, stage


def devices_of(process: int, stages: int, devices: Sequence[torch.device], gpus: int) -> list[torch.device]:
    """The devices of one of a node's processes, whose module has some number of stages.

    Args:
        process: its number on the node.
        stages: of the module.
        devices: those that Lightning was told to use, one for each process of the node.
        gpus: how many the node has.

    Raises:
        ValueError: there are too few GPUs, or they were chosen one by one.
    """
    if devices[0].type != "cuda":
        return [devices[process]] * stages
    if [device.index for device in devices] != list(range(len(devices))):
        chosen = [device.index for device in devices]
        raise ValueError(f"devices {chosen}: expected a number of processes, which take {stages} GPUs each in order")
    if stages * len(devices) > gpus:
        wanted = f"expected {stages * len(devices)} GPUs, {stages} for the stages of each process"
        raise ValueError(f"devices {len(devices)}: {wanted}; there are {gpus}")
    return [torch.device("cuda", process * stages + stage) for stage in range(stages)]


def _spans(rows: int, size: int) -> list[tuple[int, int]]:
    """First row and last + 1 of each split; one that is empty for an empty batch, as a rank can have."""
    return list(itertools.pairwise([*range(0, rows, size), rows])) or [(0, 0)]


def _joined(outputs: list[Any], spans: list[tuple[int, int]]) -> Any:
    for output, (start, stop) in zip(outputs, spans, strict=True):
        shapes = [tuple(x.shape) for x in (output if isinstance(output, tuple) else (output,))]
        if wrong := [shape for shape in shapes if shape[:1] != (stop - start,)]:
            raise ValueError(f"split_size: expected outputs with the input's {stop - start} rows first, got {wrong[0]}")
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
    return torch.cat(outputs)
