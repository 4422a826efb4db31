"""A metric of the user's own: a torchmetrics class or a function, by its import path."""

import inspect
import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from apprentice.errors import BadInput, reason
from lit_modules.nets.specs import Recorded
from lit_modules.tasks.base import EMA, FIDELITY, Metric

ROWS_OF_A_CLASS = 4  # in a trial
# Scores and figures of every classifier, by the names that they share with a metric's.
TAKEN = {"loss", "acc", "correct", "ece", "right", "predicted", "labels", "places", *FIDELITY}


class OwnMetric(Recorded):
    """What nets are judged by: a class of torchmetrics, or a function (logits, labels) -> one number.

    It gets the logits (n, classes), float32 or float64, and labels (n,) of a whole validation or test set, in the order
    of the set, so it is the same on any number of devices. A function is better when higher, unless it has an attribute
    `higher_is_better`, as classes have.

    Args:
        path: its import path.
        arguments: of the class's constructor, or of the function beside logits and labels.
    """

    def __init__(self, path: str, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.arguments = path, dict(arguments)

    def __str__(self) -> str:
        return self.path

    @property
    def target(self) -> Any:
        return resolve_name(self.path)

    @property
    def higher_is_better(self) -> bool | None:
        """As the function or an instance of the class says, as some classes make one of another; None for nothing."""
        target: Any = self.target
        declared: bool | None = getattr(
            target(**self.arguments) if inspect.isclass(target) else target, "higher_is_better", None
        )
        return declared

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The value () float64 for logits (n, classes) and labels (n,)."""
        target: Any = self.target
        if inspect.isclass(target):
            metric: Any = target(**self.arguments)
            metric.to(logits.device)
            metric.sync_on_compute = False  # each rank has all samples
            metric.update(logits, labels)
            value = metric.compute()
        else:
            value = target(logits, labels, **self.arguments)
        return torch.as_tensor(value, device=logits.device).double()

    def check(self, num_classes: int) -> None:
        """Try it on noise; BadInput if it fails or gives other than one finite number, or has the name of a score."""
        labels = torch.arange(num_classes).repeat(ROWS_OF_A_CLASS)
        logits = torch.linspace(-1, 1, len(labels) * num_classes).view(num_classes, -1).T.sin().contiguous()
        name = self.path.rpartition(".")[2]
        if name in TAKEN or name.startswith(EMA):
            expected = f"a metric of another name: {name} is a score beside it, which it would replace"
            raise BadInput("metric", self.path, expected)
        try:
            value = self(logits, labels)
        except Exception as error:  # whatever a user's function does
            expected = f"a metric of logits (n, {num_classes}) and labels (n,); it says: {reason(error)}"
            raise BadInput("metric", self.path, expected) from error
        if value.numel() != 1 or value.dim() or not math.isfinite(value):
            got = f"shape {tuple(value.shape)}" if value.dim() else float(value)
            raise BadInput("metric", self.path, f"a metric that gives one finite number; {name} gives {got}")

    def describe(self) -> Metric:
        return describe_own(self.path.rpartition(".")[2], self.higher_is_better is not False)


def describe_own(name: str, higher_is_better: bool) -> Metric:
    """A metric of this name, of which nothing else is known."""
    key = f"test_{name}"
    return Metric(
        name=key, tested=(key, "test_acc", "test_correct"), columns={key: f"test {name}"}, word=name,
        title=f"test {name}", chart=f"validation {name}", unit=name, higher_is_better=higher_is_better, scale=1.0,
        digits=4, counted="samples", limits=(-math.inf, math.inf),
    )  # fmt: skip
