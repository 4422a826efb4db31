"""Cuts a LightningModule into stages, assigns them to ranks, and measures how long layers take."""

import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from apprentice import keyed
from apprentice.contract import HasPipelineLoss, HasStages
from apprentice.errors import BadInput
from apprentice.private import tree_leaves, tree_map_only
from apprentice.weights import FEW, list_keys
from strategies.base import stages
from strategies.pipeline.states import preserve_state

REPEATS = 3  # of a measurement


def cut(module: LightningModule, rank_of: Sequence[int], sizes: list[int] | None) -> list[list[nn.Module]]:
    """Cut a module into stages with `sizes` modules each, or with about as many parameters on each rank.

    Raises:
        BadInput: the module can't be cut so, or a pipeline can't train it.
    """
    kind, name = type(module).__name__, f"{type(module).__name__}.pipeline_stages()"
    if not isinstance(module, HasStages):
        raise BadInput("strategy", "pipeline", f"a module with pipeline_stages; {kind} has none")
    if not isinstance(module, HasPipelineLoss):
        raise BadInput("strategy", "pipeline", f"a module with pipeline_loss; {kind} has none")
    if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
        raise BadInput("strategy", "pipeline", f"automatic optimization and Lightning's backward of {kind}")
    modules = list(module.pipeline_stages())
    if strange := [type(part).__name__ for part in modules if not isinstance(part, nn.Module)]:
        raise BadInput("strategy", "pipeline", f"modules from {name}, got a {strange[0]}")
    if len(modules) < len(rank_of):
        expected = f"at least {len(rank_of)} modules, one for each stage"
        raise BadInput("strategy", "pipeline", f"{expected}; {name} gives {len(modules)}")
    if sizes is not None and sum(sizes) != len(modules):
        raise BadInput("balance", sizes, f"numbers that add up to {len(modules)}, the modules that {name} gives")
    groups = stages.group_modules(modules, sizes or stages.sizes_by_parameters(modules, rank_of))
    stages.check(module, groups)
    return groups


class StageAssignment:
    """Assigns stages to ranks as a schedule needs it; raises torch's ValueError where it can't run."""

    def __init__(self, schedule: str, ranks: int, stages_per_rank: int | None, num_microbatches: int) -> None:
        self.schedule_class, self.num_microbatches = get_schedule_class(schedule), num_microbatches
        self.is_multi = issubclass(self.schedule_class, PipelineScheduleMulti)
        self.stages_per_rank = stages_per_rank or (2 if self.is_multi else 1)
        if not self.is_multi and self.stages_per_rank != 1:
            raise ValueError(f"{schedule} has one stage on each rank")  # as torch says what it can't run
        self.num_stages = ranks * self.stages_per_rank
        stand_ins = [SimpleNamespace(num_stages=self.num_stages, group_size=ranks, group_rank=0, stage_index=i,
                     is_first=False, is_last=False, submod=None) for i in range(self.stages_per_rank)]  # fmt: skip
        places = getattr(self.schedule_of(stand_ins), "stage_index_to_group_rank", None) or range(ranks)
        self.rank_of = [places[stage] for stage in range(self.num_stages)]

    def schedule_of(self, stages: Sequence[Any], **options: Any) -> Any:
        """Torch's schedule over a rank's stages; the last stage's output is the loss."""
        stage = stages if self.is_multi else stages[0]
        return self.schedule_class(stage, self.num_microbatches, loss_fn=lambda output, _: output, **options)


def warn_of_other_numbers(module: LightningModule, splits_batches: bool) -> None:
    """Warn of layers whose numbers depend on the pipeline, before the module is cut."""
    if noisy := keyed.find_unkeyed_layers(module):
        advice = "its numbers depend on the stages; those of apprentice.keyed.Dropout do not"
        rank_zero_warn(f"{list_keys(noisy, FEW)}: noise from torch's generator; {advice}")
    if splits_batches and (normalised := stages.batch_norms(module)):
        advice = "GroupNorm's numbers are those of one device"
        rank_zero_warn(f"{list_keys(normalised, FEW)}: BatchNorm sees a micro-batch, not the batch; {advice}")


def seconds(modules: Sequence[nn.Module], inputs: tuple[Tensor, ...], request: object = None) -> list[float]:
    """Measure each module's forward and backward in a chain: the minimum of a few runs; modules stay unchanged."""
    times, x = [], inputs
    for module in modules:
        with preserve_state([module], inputs[0].device):
            runs = [_time(module, x, request, inputs[0].device) for _ in range(REPEATS)]
        module.zero_grad()
        x = runs[0][0]
        times.append(min(time for _, time in runs))
    return times


def _time(module: nn.Module, x: Any, request: object, device: torch.device) -> tuple[Any, float]:
    # Clones of leaves, as layers may work in place. The batch itself needs no gradient.
    x = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad).clone(), x)
    synchronize = partial(torch.get_device_module(device).synchronize, device)
    synchronize()
    start = time.perf_counter()
    y = stages.apply_modules([module], x, request)
    outputs = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(leaf) for leaf in outputs])
    synchronize()
    return y, time.perf_counter() - start
