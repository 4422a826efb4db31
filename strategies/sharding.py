"""What FSDP and HSDP do to a module: shard it in units, make it whole again, recompute activations."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from apprentice.contract import layout_of
from apprentice.errors import BadInput
from strategies.base.checkpoints import gather_tensor
from strategies.base.private import module_state_mapping
from strategies.tensor_parallel import order

Shard = Callable[[nn.Module, bool], None]
Place = tuple[nn.Module, str]  # a module, and the name of its buffer or attribute


def units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to shard: those of the module's layout, or else its children."""
    if (sharded := layout_of(module).sharded) is not None:
        yield from sharded
    else:
        for child in module.children():
            if _is_called(child):
                yield child
            else:
                yield from units(child)


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of each `nn.Sequential` and `nn.ModuleList` in a module."""
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and _is_called(child):
            yield child
        else:
            yield from layers(child)


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward, unlike lists and dictionaries of modules."""
    return type(module).forward is not nn.Module.forward


class Sharding:
    """Shards a module's parameters until `undo`, which finds by comparison what `fully_shard` has added to the module.

    `shard` shards a module in place, except parts that are sharded already; it gets whether the module is a layer.
    Before, `cut` may replace parameters of a module by this rank's part of them.
    """

    def __init__(self, module: nn.Module, shard: Shard, cut: Callable[[nn.Module], None]) -> None:
        modules = list(module.modules())
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for m in modules:
            for name, p in m.named_parameters(recurse=False, remove_duplicate=False):
                self._places.setdefault(p, []).append((m, name))
        self._strides = {p: p.stride() for p in self._places}
        parts = [unit for unit in units(module) if next(unit.parameters(), None) is not None]
        self._owners = self._places
        self._check(module, parts)
        before = [(m, type(m), _contents(m)) for m in modules]  # not a dictionary, as the hashes of metrics change
        for unit in parts:
            cut(unit)
        self._owners = {getattr(*places[0]): places for places in self._places.values()}
        for unit in parts:
            self._shard(unit, shard)
        self._changes = [(m, kind, _contents(m) - contents) for m, kind, contents in before]
        for p, places in self._places.items():
            if isinstance(getattr(*places[0]), DTensor):
                p.data = p.data.new_empty(0)

    def _check(self, module: nn.Module, parts: list[nn.Module]) -> None:
        inside = {p for unit in parts for p in unit.parameters()}
        for name, p in module.named_parameters():
            if p.requires_grad and p not in inside:
                place = "inside a child that is called, or a module that the layout's `sharded` names"
                raise BadInput("", f"{name} can't be sharded", f"a trainable parameter {place}")
        names = {p: name for name, p in module.named_parameters()}
        if scalars := [names[p] for unit in parts for p in unit.parameters() if not p.dim()]:
            raise BadInput("", f"{scalars[0]} can't be sharded", "a tensor of one number, not a scalar")
        for unit in parts:
            for name, p in unit.named_parameters():
                if self._is_shared(p, unit):
                    where = f"{name} of {type(unit).__name__}"
                    raise BadInput("", f"{where} can't be sharded", "a parameter of one module; another has it, too")

    def _is_shared(self, p: nn.Parameter, module: nn.Module) -> bool:
        inside = set(module.modules())
        return any(m not in inside for m, _ in self._owners[p])

    def _shard(self, unit: nn.Module, shard: Shard) -> None:
        unit.apply(_make_contiguous)
        for layer in layers(unit):
            shared = [self._is_shared(p, layer) for p in layer.parameters() if p in self._owners]  # not sharded yet
            if shared and not any(shared):
                shard(layer, True)
        shard(unit, False)
        for m in unit.modules():
            if isinstance(m, FSDPModule):  # memory first allocated in inference mode can't be trained
                m.unshard()
                m.reshard()

    def undo(self) -> None:
        """Restore the whole parameters, on the CPU, and remove what was added; collective."""
        for m, _, _ in self._changes:
            if isinstance(m, FSDPModule):
                m.reshard()
        for p, places in self._places.items():
            shards = getattr(*places[0])
            if isinstance(shards, DTensor):
                values = gather_tensor(shards, order(places[0][0]))
                p.data = torch.empty_strided(values.shape, self._strides[p], dtype=values.dtype).copy_(values)
                p.requires_grad_(shards.requires_grad)
                for m, name in places:
                    setattr(m, name, p)
        for m, kind, added in self._changes:
            if isinstance(m, FSDPModule):
                cast("Any", m).__class__ = kind
                module_state_mapping.pop(m, None)  # else torch refuses to shard it again
            for name, *keys in added:
                for key in keys:
                    vars(m).get(name, {}).pop(key, None)
                if not keys:
                    vars(m).pop(name, None)


def _contents(module: nn.Module) -> set[tuple[Any, ...]]:
    """Return the names of a module's attributes, and the keys of those that are dictionaries, such as its hooks."""
    keys = {(name, key) for name, value in vars(module).items() if isinstance(value, dict) for key in value}
    return keys | {(name,) for name in vars(module)}


def _make_contiguous(module: nn.Module) -> None:
    """Give parameters the layout that `fully_shard` wants; channels-last weights convert their inputs instead."""
    for p in module.parameters(recurse=False):
        if p.is_contiguous():
            continue
        if p.is_contiguous(memory_format=torch.channels_last):
            module.register_forward_pre_hook(_to_channels_last)
        p.data = p.data.contiguous()


def _to_channels_last(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    images = [isinstance(x, Tensor) and x.dim() == 4 for x in inputs]
    pairs = zip(inputs, images, strict=True)
    return tuple(x.contiguous(memory_format=torch.channels_last) if image else x for x, image in pairs)


def recompute(layer: nn.Module) -> None:
    """Store only the layer's inputs and buffers for backward; parameters, names, results and noise stay the same."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _StartOfForward(layer)  # of forward and of the recomputation

    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


class _StartOfForward:
    """Inside, a layer's buffers and numbers, and the context variables, which key noise, are those of now.

    Changes inside are dropped. Copies take the places of the buffers, as autograd may have saved these.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._context, modules = copy_context(), [*layer.modules()]
        self._buffers = _clone({(m, name): buffer for m in modules for name, buffer in m._buffers.items()})
        self._numbers = {(m, name): x for m in modules for name, x in vars(m).items() if isinstance(x, int | float)}

    def __enter__(self) -> None:
        with ExitStack() as undo:
            for variable, value in self._context.items():
                undo.callback(variable.reset, variable.set(value))
            for (module, name), buffer in _clone(self._buffers).items():
                undo.callback(module._buffers.update, {name: module._buffers[name]})
                module._buffers[name] = buffer
            for (module, name), number in self._numbers.items():
                undo.callback(vars(module).update, {name: vars(module)[name]})
                vars(module)[name] = number
            self._undo = undo.pop_all()

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _clone(buffers: Mapping[Place, Tensor | None]) -> dict[Place, Tensor | None]:
    copies = {buffer: buffer.clone() for buffer in buffers.values() if buffer is not None}  # some have several places
    return {place: None if buffer is None else copies[buffer] for place, buffer in buffers.items()}
