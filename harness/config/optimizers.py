"""Optimizers and schedulers as choices, tried out on a dummy net so that wrong values are found before training."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from apprentice.errors import BadInput
from harness.config.building import factory, refusals
from harness.config.choices import Choice, Family

ONE_AT_A_TIME = "one scheduler by itself, as MultiStepLR or CosineAnnealingLR"
REFUSED_OPTIMIZERS = {
    torch.optim.LBFGS: "one that steps each student by itself, as Adam or SGD; this one couples students",
    torch.optim.SparseAdam: "one for dense gradients, as Adam",
}
REFUSED_SCHEDULERS = {
    lr_scheduler.ReduceLROnPlateau: "one that depends on the epoch alone, as MultiStepLR; this one couples students",
    lr_scheduler.SequentialLR: ONE_AT_A_TIME,
    lr_scheduler.ChainedScheduler: ONE_AT_A_TIME,
}


def optimizers() -> Family:
    """Any optimizer of torch, or anyone's, that steps each student by itself."""
    return Family((torch.optim.Optimizer,), torch.optim, frozenset({"params"}), REFUSED_OPTIMIZERS)


def schedulers() -> Family:
    """Any scheduler of torch, or anyone's, that depends on the epoch alone."""
    skip = frozenset({"optimizer", "last_epoch"})
    return Family((lr_scheduler.LRScheduler,), lr_scheduler, skip, REFUSED_SCHEDULERS)


def try_out(optimizer: Choice, scheduler: Choice | None, epochs: int) -> None:
    """One step, and as many epochs, on a dummy net.

    Raises:
        BadInput: they can't be built, or stumble on the way.
    """
    net = nn.Linear(2, 2)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    on_gpu_only = optimizer.init_args.get("capturable")
    steps: Any = None
    with _faults(optimizer, "optimizer"):
        steps = factory(optimizer, "optimizer")(net.parameters())
        if not on_gpu_only:
            steps.step()
    if scheduler is None:
        return
    with _faults(scheduler, "scheduler"):
        rates = factory(scheduler, "scheduler")(steps)
        for _ in range(epochs):
            rates.step()


@contextmanager
def _faults(choice: Choice, key: str) -> Iterator[None]:
    """In a trial, whatever goes wrong is the options' fault."""
    with refusals(choice, key), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (BadInput, ValueError, TypeError):
            raise
        except Exception as error:
            raise ValueError(str(error)) from error
