"""Learning-rate schedules: cosine with warm-up, and torch's, built for the length of a training."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, SequentialLR

from apprentice.errors import BadInput

MakeScheduler = Callable[[Optimizer], LRScheduler]
PARTS = "schedulers"  # argument of those that are made of others


class Length(NamedTuple):
    """How long a training is, in steps of the optimizer."""

    steps: float  # of the whole training; infinite without a limit
    steps_per_epoch: int


def nominal(epochs: int = 1000) -> Length:
    """A length to try a schedule with before the training's is known: its epochs have more steps than real ones."""
    return Length(epochs * 100_000, 100_000)


class CosineWarmup(LRScheduler):
    """Raises the rate linearly over a warm-up, then lowers it along half a cosine to the end of training, step by step.

    With base rate r, w steps of warm-up and T steps in all, step t has r (s + (1 - s) t / w) with s = `start_factor`
    while t < w, then m + (r - m) (1 + cos(pi (t - w) / (T - w))) / 2 with m = `eta_min`: torch's `LinearLR` followed by
    its `CosineAnnealingLR`. (Loshchilov and Hutter 2017, "SGDR"; Goyal et al. 2017, for the warm-up.)

    Args:
        optimizer: whose groups' rates at the start are the base rates.
        warmup_epochs: length of the warm-up in epochs, of which a part is rounded to steps.
        warmup_steps: its length in the optimizer's steps, in place of epochs.
        start_factor: of the base rate, with which the warm-up begins.
        eta_min: rate at the end.
        total_steps: of the schedule; by default the training's.
        steps_per_epoch: by default the training's.
        last_epoch: the number of the last step, as torch calls it.
        warmup_ratio: the warm-up's share of the whole schedule; counts where neither its epochs nor steps are given.

    Raises:
        BadInput: the warm-up is not shorter than the schedule, or an option is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_epochs: float = 0.0,
        warmup_steps: int = 0,
        start_factor: float = 0.01,
        eta_min: float = 0.0,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        last_epoch: int = -1,
        warmup_ratio: float = 0.0,
    ) -> None:
        if total_steps is None or (warmup_epochs and steps_per_epoch is None):
            raise BadInput("total_steps", "None", "a number of steps; a Trainer's is filled in where it builds this")
        if not 0 < start_factor <= 1:
            raise BadInput("start_factor", start_factor, "a factor of the rate, above 0 and at most 1")
        if warmup_epochs and warmup_steps:
            raise BadInput("warmup_steps", warmup_steps, "either this or warmup_epochs")
        warmups = {"warmup_epochs": warmup_epochs, "warmup_steps": warmup_steps, "warmup_ratio": warmup_ratio}
        option, value = next(((name, value) for name, value in warmups.items() if value), ("warmup_steps", 0))
        lengths = {"warmup_epochs": steps_per_epoch or 0, "warmup_ratio": total_steps, "warmup_steps": 1}
        self.total_steps, self.warmup = total_steps, round(value * lengths[option])
        if not 0 <= self.warmup < total_steps:
            raise BadInput(option, value, "a warm-up of 0 or more, shorter than the whole schedule")
        self.start_factor, self.eta_min = start_factor, eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each group at this step."""
        step, warmup = min(self.last_epoch, self.total_steps), self.warmup
        if step < warmup:
            factor = self.start_factor + (1 - self.start_factor) * step / warmup
            return [rate * factor for rate in self.base_lrs]
        cosine = (1 + math.cos(math.pi * (step - warmup) / (self.total_steps - warmup))) / 2
        return [self.eta_min + (rate - self.eta_min) * cosine for rate in self.base_lrs]


BY_STEP = OneCycleLR, CyclicLR, CosineWarmup  # these count the optimizer's steps; all others count epochs


def build_scheduler(make: MakeScheduler, optimizer: Optimizer, length: Length) -> tuple[LRScheduler, bool]:
    """Make a scheduler, and say whether it counts steps.

    Where `make` is a partial of `OneCycleLR` or `CosineWarmup` without a number of steps, the training's is filled in.
    Where it is one of `SequentialLR` or `ChainedScheduler`, whose parts are partials too, these are made first; one of
    a sequence gets the length from its milestone to the next.

    Raises:
        BadInput: some parts count steps and others epochs, or the training has no end and the schedule needs one.
    """
    target, options = _of_partial(make)
    parts: Sequence[Any] = options.get(PARTS, ())
    if not (parts and all(isinstance(part, partial) for part in parts)):
        made = _fill(make, length)(optimizer)
        return made, isinstance(made, BY_STEP)
    by_step = [_counts_steps(part) for part in parts]
    if len(set(by_step)) > 1:
        names = " and ".join(_of_partial(part)[0].__name__ for part in parts)
        raise BadInput(PARTS, names, "schedulers that all count epochs, or all steps, as OneCycleLR does")
    lengths = [length] * len(parts)
    if issubclass(target, SequentialLR) and len(options.get("milestones", ())) == len(parts) - 1:
        bounds = [0, *options["milestones"], length.steps if by_step[0] else math.inf]
        lengths = [length._replace(steps=stop - start) for start, stop in pairwise(bounds)]
    made_parts = [build_scheduler(part, optimizer, of)[0] for part, of in zip(parts, lengths, strict=True)]
    return target(**{**options, "optimizer": optimizer, PARTS: made_parts}), by_step[0]


def follows_length(make: MakeScheduler | None) -> bool:
    """Whether a schedule depends on how long the training is, so that a longer one has other rates from the start."""
    if make is None:
        return False
    parts = _of_partial(make)[1].get(PARTS, ())
    return _fill(make, nominal()) is not make or any(
        isinstance(part, partial) and follows_length(part) for part in parts
    )


def check_steps(scheduler: LRScheduler, steps: float) -> None:
    """Raise BadInput if a schedule that ends has fewer steps than the training: its last rate may be 0."""
    if isinstance(scheduler, OneCycleLR | CosineWarmup) and scheduler.total_steps < steps:
        expected = f"at least {steps}, the optimizer's steps in this training"
        raise BadInput("scheduler.total_steps", scheduler.total_steps, expected)


def _of_partial(make: MakeScheduler) -> tuple[Any, dict[str, Any]]:
    return (make.func, dict(make.keywords)) if isinstance(make, partial) else (make, {})


def _counts_steps(make: MakeScheduler) -> bool:
    target, options = _of_partial(make)
    parts = options.get(PARTS, ())
    return any(map(_counts_steps, parts)) if parts else isinstance(target, type) and issubclass(target, BY_STEP)


def _fill(make: MakeScheduler, length: Length) -> MakeScheduler:
    """Bind the length of the training where a schedule needs it and has none."""
    target, options = _of_partial(make)
    if not isinstance(target, type):
        return make
    filled: dict[str, Any] = {}
    if issubclass(target, CosineWarmup):
        needed = {"total_steps": length.steps}
        if options.get("warmup_epochs"):
            needed["steps_per_epoch"] = length.steps_per_epoch
        filled = {name: value for name, value in needed.items() if options.get(name) is None}
    elif issubclass(target, OneCycleLR) and options.get("total_steps") is None:
        epochs, steps_per_epoch = options.get("epochs"), options.get("steps_per_epoch")
        if epochs is None:
            filled = {"total_steps": length.steps}
        elif steps_per_epoch is None:
            filled = {"steps_per_epoch": length.steps_per_epoch}
    if not filled:
        return make
    if math.inf in filled.values():
        expected = "a training with a number of epochs or steps, on which this schedule depends"
        raise BadInput("total_steps", "None", expected)
    return partial(make, **filled)
