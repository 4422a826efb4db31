"""Nets as chains of modules, which a pipeline cuts into stages."""

from collections.abc import Iterable, Sequence

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets.base import layer


def pipeline_stages(net: nn.Module, flag: str = "net") -> list[nn.Module]:
    """Modules whose composition is the net's forward: its `pipeline_stages()`, or a sequence's parts; else BadInput."""
    if (own := getattr(net, "pipeline_stages", None)) is not None:
        return own()
    if _is_chain(net):
        return cuttable(net.children())
    raise BadInput(flag, type(net).__name__, "a net that can be cut: with pipeline_stages(), or an nn.Sequential")


def cuttable(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules, with sequences split into their members, and in-place modules joined to their predecessors.

    A stage can't begin in place: it would change a tensor that others may still read.
    """
    groups: list[list[nn.Module]] = []
    for module in _members(modules):
        if groups and getattr(module, "inplace", False):
            groups[-1].append(module)
        else:
            groups.append([module])
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


def _members(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # Subclasses of Sequential, such as a convolution with its norm, stay whole.
    return [part for m in modules for part in (_members(m) if type(m) is nn.Sequential else [m])]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def stage_of(net: nn.Module, stages: Sequence[nn.Module], path: str, flag: str = "layer") -> tuple[int, nn.Module]:
    """The number of the stage that computes a layer's output, and the module that gives it.

    That is the layer itself, or the last member of a sequence that was split.

    Raises:
        BadInput: the net has no such layer, or no module in a stage gives its output.
    """
    module = layer(net, path, flag)
    while True:
        for number, stage in enumerate(stages):
            if module in set(stage.modules()):
                return number, module
        if not _is_chain(module):
            expected = f"a layer of {type(net).__name__} inside a pipeline stage, or a sequence of such"
            raise BadInput(flag, path, expected)
        module = list(module.children())[-1]
