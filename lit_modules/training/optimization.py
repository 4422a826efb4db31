"""How the runs of a loop are optimized: one optimizer with a group a run, its scheduler, and clipped gradients."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from apprentice.errors import BadInput, naming, reason
from lit_modules.nets.specs import rebuild
from lit_modules.schedules import Length, MakeScheduler, build_scheduler, check_steps, nominal
from lit_modules.training.training_log import tags

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
adam = partial(Adam, lr=1e-3)  # the tutorial's optimizer


class Optimization:
    """Makes the optimizer of a loop's parameters, and its scheduler.

    The scheduler is stepped once an epoch, those of `lit_modules.schedules.BY_STEP` with each step of the optimizer.

    Args:
        optimizer: makes the optimizer from parameter groups.
        scheduler: makes the scheduler.
        options: by run, options of the optimizer that are not those of the others.
    """

    compiled = False  # whether nets are compiled

    def __init__(
        self,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.make_optimizer: MakeOptimizer = rebuild(optimizer, "optimizer")
        self.make_scheduler: MakeScheduler | None = rebuild(scheduler, "scheduler")
        self.options = dict(options)  # the default can't be copied or pickled

    def configure(self, loop: "Loop") -> Any:
        """Return what `configure_optimizers` does."""
        optimizer = self._build(loop)
        if self.make_scheduler is None:
            return [optimizer], []
        with naming("scheduler"):
            scheduler, by_step = build_scheduler(self.make_scheduler, optimizer, _length(loop))
        if loop.attached_trainer is not None:
            check_steps(scheduler, _length(loop).steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step" if by_step else "epoch"}]

    def check(self, loop: "Loop", steps: float, steps_per_epoch: int = 1) -> None:
        """Raise BadInput if the optimizer can't take a parameter, or the scheduler does not fit so many steps."""
        optimizer = self._build(loop)
        if self.make_scheduler is not None:
            with naming("scheduler"):
                scheduler, _ = build_scheduler(self.make_scheduler, optimizer, Length(steps, steps_per_epoch))
            check_steps(scheduler, steps)

    def _build(self, loop: "Loop") -> Optimizer:
        """Make the optimizer of the runs' parameters; BadInput names one that it can't take."""
        check_trainable(loop)
        groups = [{"params": group, **self.options.get(run, {})} for run, group in loop.parameter_groups().items()]
        try:
            return self.make_optimizer(groups)
        except ValueError as error:
            for path, parameter in loop.named_parameters():
                if parameter.requires_grad:
                    self._try(path, parameter)
            raise error from None

    def _try(self, path: str, parameter: nn.Parameter) -> None:
        try:
            self.make_optimizer([parameter])
        except ValueError as error:
            name = getattr(getattr(self.make_optimizer, "func", self.make_optimizer), "__name__", "this one")
            shape = f"{path} {tuple(parameter.shape)}"
            raise BadInput("optimizer", name, f"one that takes {shape}; it says: {reason(error)}") from None

    def check_loop(self, loop: "Loop") -> None:
        """Raise BadInput if the nets can't be optimized so."""

    def on_fit_start(self, loop: "Loop") -> None:
        """Prepare the nets, in each rank."""

    def clip(self, loop: "Loop", norm: float | None, algorithm: str | None) -> None:
        """Clip each run's gradients separately: a student's step must not depend on other students."""
        if not norm:
            return
        clip = loop.trainer.precision_plugin.clip_gradients  # a strategy that cuts the module may replace it
        for parameters in loop.parameter_groups().values():
            run: Any = SimpleNamespace(param_groups=[{"params": parameters}])  # all that it reads of an optimizer
            clip(run, norm, GradClipAlgorithmType(algorithm or "norm"))


def log_optimizer(loop: "Loop", optimizer: Optimizer) -> None:
    """Log each run's learning rate and gradient norm, before clipping, by the names that Lightning gives them."""
    norm = getattr(loop.trainer.strategy, "gradient_norm", gradient_norm)
    values: dict[str, float | Tensor] = {}
    first_groups = optimizer.param_groups[:: len(optimizer.param_groups) // len(loop.runs)]  # of each run
    for group, (run, parameters) in zip(first_groups, loop.parameter_groups().items(), strict=False):
        values[f"{run}/lr-{type(optimizer).__name__}"] = group["lr"]
        if (total := norm(parameters)) is not None:
            values[f"{run}/grad_2.0_norm_total"] = total
    off = loop.inactive
    alive = {name.removeprefix("/"): x for name, x in values.items() if name.rpartition("/")[0] not in off}
    loop.training_log.log_step(loop, "optimizer", tags(alive, "train"))


def check_trainable(loop: "Loop") -> None:
    """Raise BadInput if a net is frozen."""
    for run in loop.runs:
        net = loop.net_of(run)
        if not any(p.requires_grad for p in net.parameters()):
            expected = "a net that can be trained; all of its parameters are frozen"
            raise BadInput(f"variants.{run}" if run else "net", type(net).__name__, expected)


def _length(loop: "Loop") -> Length:
    """Return the length of the attached Trainer's fit."""
    if loop.attached_trainer is None:
        return nominal()
    steps = loop.trainer.estimated_stepping_batches  # sets up the data, whose batches are counted
    batches = loop.trainer.num_training_batches
    of_epoch = 1 if math.isinf(batches) else math.ceil(batches / loop.trainer.accumulate_grad_batches)
    return Length(steps, of_epoch)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Return the norm of all gradients, () float64; None if there are none; collective if they are sharded."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]))
    norm: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return norm
