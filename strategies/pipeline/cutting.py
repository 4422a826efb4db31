"""Cuts a LightningModule into stages, and checks that it can be."""

from collections.abc import Callable, Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from apprentice import keyed
from strategies.base import stages


def check_contract(module: LightningModule) -> None:
    """Raise ValueError for a module that a pipeline can't train."""
    kind = type(module).__name__
    for name in ("pipeline_stages", "pipeline_loss"):
        if not callable(getattr(module, name, None)):
            raise ValueError(f"strategy pipeline: expected a module with {name}; {kind} has none")
    if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
        raise ValueError(f"strategy pipeline: expected automatic optimization and Lightning's backward of {kind}")


def cut(
    module: LightningModule,
    count: int,
    sizes: list[int] | None,
    costs: Callable[[Sequence[nn.Module]], list[float]] | None,
) -> list[list[nn.Module]]:
    """The modules of each stage, by given sizes, costs, or numbers of parameters; ValueError if it can't be cut so."""
    name = f"{type(module).__name__}.pipeline_stages()"
    modules: list[nn.Module] = list(module.pipeline_stages())  # type: ignore[operator]
    if strange := [type(part).__name__ for part in modules if not isinstance(part, nn.Module)]:
        raise ValueError(f"strategy pipeline: expected modules from {name}, got a {strange[0]}")
    if len(modules) < count:
        expected = f"expected at least {count} modules, one for each stage"
        raise ValueError(f"strategy pipeline: {expected}; {name} gives {len(modules)}")
    if sizes is not None and sum(sizes) != len(modules):
        expected = f"expected numbers that add up to {len(modules)}, the modules that {name} gives"
        raise ValueError(f"balance {sizes}: {expected}")
    if sizes is None and costs is not None:
        sizes = stages.sizes_by_cost(costs(modules), count)
    groups = stages.grouped(modules, sizes or stages.sizes_by_parameters(modules, count))
    stages.check(module, groups)
    return groups


def warn_of_other_numbers(module: LightningModule, splits_batches: bool) -> None:
    """Warn of layers whose numbers depend on the pipeline, before the module is cut."""
    if noisy := keyed.unkeyed(module):
        advice = "its numbers depend on the stages; those of apprentice.keyed.Dropout do not"
        rank_zero_warn(f"{', '.join(noisy)}: noise from torch's generator; {advice}")
    if splits_batches and (normalised := stages.batch_norms(module)):
        advice = "GroupNorm's numbers are those of one device"
        rank_zero_warn(f"{', '.join(normalised)}: BatchNorm sees a micro-batch, not the batch; {advice}")
