"""Nets as chains of modules, to be cut into the stages of a pipeline."""

from collections.abc import Iterable, Sequence

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets.base import layer


def pipeline_stages(net: nn.Module, flag: str = "net") -> list[nn.Module]:
    """Modules of the net, in order, whose composition is its forward: by its own `pipeline_stages()`, if it has that.

    Args:
        net: the net.
        flag: where it was chosen.

    Raises:
        BadInput: the net has no such method and is no `nn.Sequential`.
    """
    own = getattr(net, "pipeline_stages", None)
    if own is not None:
        return own()
    if _is_chain(net):
        return cuttable(net.children())
    raise BadInput(flag, type(net).__name__, "a net that can be cut: with pipeline_stages(), or an nn.Sequential")


def cuttable(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with sequences replaced by their members, and what works in place joined to what is before it.

    A stage can't begin in place: it would change what was received, which others may have yet to read.
    """
    groups: list[list[nn.Module]] = []
    for module in _members(modules):
        if groups and getattr(module, "inplace", False):
            groups[-1].append(module)
        else:
            groups.append([module])
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


def _members(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # Subclasses of Sequential, such as a convolution with its norm, are blocks of their authors'.
    return [part for m in modules for part in (_members(m) if type(m) is nn.Sequential else [m])]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def stage_of(net: nn.Module, stages: Sequence[nn.Module], path: str, flag: str = "layer") -> tuple[int, nn.Module]:
    """Where a layer's output is to be had when the net runs stage by stage.

    Args:
        net: the net.
        stages: what `pipeline_stages(net)` gives.
        path: of the layer, as objectives name it: "default" is the net's own.
        flag: where it was chosen.

    Returns:
        The number of the stage after which the output is there, and the module whose output it is: the layer, or, where
        that is a sequence which was itself cut, its last member.

    Raises:
        BadInput: the net has no such layer, or its output is that of no module in a stage.
    """
    module = layer(net, path, flag)
    while True:
        for number, stage in enumerate(stages):
            if module in set(stage.modules()):
                return number, module
        if not _is_chain(module):
            raise BadInput(
                flag, path, f"a layer of {type(net).__name__} inside a pipeline stage, or a sequence of such"
            )
        module = list(module.children())[-1]
