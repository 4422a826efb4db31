"""Tensor parallelism: each rank of a group computes a part of a net's layers, as `tensor_parallel_plan()` says."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from apprentice.contract import HasTensorPlan, Joined, layout_of
from apprentice.errors import BadInput

DATA, TENSOR = "data", "tensor"  # dimensions of a mesh
ORDER = "_tensor_parallel_order"  # attribute of a layer while its rows are in another order than one device's
PART = "part"  # attribute of such a layer: the number of the part that this rank has of each matrix

Plan = dict[str, ParallelStyle]  # by the path of a layer


def sizes(mesh: Mapping[str, int] | DeviceMesh, ranks: int) -> tuple[int, int]:
    """Return the sizes of `data` and `tensor`; one that a mapping leaves out follows from the number of ranks.

    Raises:
        BadInput: there are other dimensions, or the sizes don't fit the number of ranks.
    """
    if isinstance(mesh, DeviceMesh):
        shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        has_names = [*shape] == [DATA, TENSOR]
    else:
        shape = dict(mesh)
        has_names = bool(shape) and {*shape} <= {DATA, TENSOR}
    if has_names and min(shape.values()) > 0:
        data = shape.get(DATA) or ranks // shape[TENSOR]
        tensor = shape.get(TENSOR) or ranks // data
        if data * tensor == ranks:
            return data, tensor
    raise BadInput("mesh", shape, f"{DATA} and {TENSOR}, sizes whose product is {ranks}, the number of devices")


def check(module: nn.Module, mesh: Mapping[str, int] | DeviceMesh, ranks: int) -> None:
    """Raise BadInput for `mesh` where so many ranks can't compute the module's nets together."""
    nets = list(_find_plans(module))
    partial: dict[tuple[nn.Module, bool], str] = {}
    if not nets:
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        names = dict.fromkeys(type(child).__name__ for child in children)
        expected = f"a net with tensor_parallel_plan(), such as GPT or ViT; there is {', '.join(names)}"
        raise BadInput("mesh", mesh, expected)
    for name, net, plan in nets:
        for path, style in plan.items():
            rows, layer = _rows(net.get_submodule(path), style), f"{name}.{path}".strip(".")
            if rows % ranks:
                raise BadInput("mesh", mesh, f"a size of {TENSOR} that divides {rows}, into which {layer} can be cut")
        partial |= {(part, end): f"{name}.{path}".strip(".") for path, part, end in _partial(net, plan)}
    for read in layout_of(module).read_layers:
        if read in partial:
            expected = f"objectives that read whole layers, not {partial[read]}, of which each rank has a part"
            raise BadInput("mesh", mesh, expected)


def cut(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Leave this rank its part of the layers of all nets inside a module; whether there are such nets."""
    nets = list(_find_plans(module))
    for _, net, plan in nets:
        for path, style in plan.items():
            layer = net.get_submodule(path)
            if isinstance(layer, Joined):
                matrices = torch.arange(next(layer.parameters()).shape[0]).split(layer.joined[0])
                parts = [rows.view(mesh.size(), -1) for rows in matrices]  # of each rank, for each matrix
                order = torch.cat(parts, 1).flatten()
                setattr(layer, ORDER, order)
                setattr(layer, PART, mesh.get_local_rank())
                for p in layer.parameters(recurse=False):
                    p.data = p.data[order.to(p.device)]
            padding = _EmptyBatches()
            layer.register_forward_pre_hook(padding.add_row)
            parallelize_module(layer, mesh, style, src_data_rank=None)  # all ranks have the same weights
            layer.register_forward_hook(padding.remove_row)
    return bool(nets)


def order(layer: nn.Module) -> Tensor | None:
    """(rows,) int64: the row of one device's weight for each of this layer's rows; None: the same order."""
    return getattr(layer, ORDER, None)


class _EmptyBatches:
    """Adds a row of zeros to a layer's empty inputs, which torch can't shard, and removes its output."""

    def __init__(self) -> None:
        self._empty = False

    def add_row(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._empty = not len(inputs[0])
        if not self._empty:
            return None
        return torch.cat([inputs[0], inputs[0].new_zeros(1, *inputs[0].shape[1:])]), *inputs[1:]

    def remove_row(self, _layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        return output[:0] if self._empty else output


def _find_plans(module: nn.Module) -> Iterator[tuple[str, nn.Module, Plan]]:
    """Yield name, net and plan of each net in a module that has a plan; expands the patterns in a plan's paths."""
    for name, net in module.named_modules():
        styles = net.tensor_parallel_plan() if isinstance(net, HasTensorPlan) else None
        if styles is None:
            continue
        paths = [path.split(".") for path, _ in net.named_modules()]
        plan: Plan = {}
        for pattern, style in styles.items():
            parts = pattern.split(".")
            matches = [path for path in paths if len(path) == len(parts) and all(map(fnmatchcase, path, parts))]
            plan |= {".".join(path): style for path in matches}
        yield name, net, plan


def _rows(layer: nn.Module, style: ParallelStyle) -> int:
    """Return the number of parts into which a layer can be cut."""
    if isinstance(layer, Joined):
        return layer.joined[1]
    if not isinstance(layer, nn.Linear):
        return 0  # torch says what it can't cut
    return layer.in_features if isinstance(style, RowwiseParallel) else layer.out_features


def _partial(net: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules between two cut ones: a rank has a part of their output, or of their input where true."""
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in plan):
        inside = False
        for name, child in net.get_submodule(parent).named_children():
            path = f"{parent}.{name}".strip(".")
            style = plan.get(path)
            if inside:
                yield from ((f"{path}.{inner}".strip("."), m, True) for inner, m in child.named_modules())
            inside = (inside or isinstance(style, ColwiseParallel)) and not isinstance(style, RowwiseParallel)
            if inside:
                yield from ((f"{path}.{inner}".strip("."), m, False) for inner, m in child.named_modules())
