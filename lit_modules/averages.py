"""Exponential moving averages of students' weights, beside the weights that are trained."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from apprentice.errors import BadInput
from lit_modules.learner import Learner


def average_weights(net: nn.Module, decay: float) -> AveragedModel:
    """Make torch's `AveragedModel` of a net: a frozen copy in eval mode, updated after steps of the optimizer.

    After the first step it has the net's weights w, then decay * average + (1 - decay) * w. Running statistics of
    BatchNorm are averaged as weights are; whole numbers, such as places in a table, are the net's.

    Raises:
        BadInput: the decay is not between 0 and 1.
    """
    if not 0 < decay < 1:
        raise BadInput("ema", decay, "a decay between 0 and 1, such as 0.999")
    averaged = AveragedModel(net, multi_avg_fn=partial(_update, decay), use_buffers=True)
    return averaged.requires_grad_(False).eval()


def _update(decay: float, averages: Sequence[Tensor], weights: Sequence[Tensor], count: Any) -> None:
    if weights[0].is_floating_point():  # all have one type
        get_ema_multi_avg_fn(decay)(list(averages), list(weights), count)  # itself can't be pickled
        return
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(weight)


class AveragingLearner(Learner):
    """A Learner that may keep, validate and test moving averages of its runs' weights, as `averages` by run."""

    averages: nn.ModuleDict
    _averaged_step = 0  # up to which weights are averaged

    def average_runs(self, decay: float | None) -> None:
        """Begin averages of the nets as they are; none without a decay."""
        runs = self.runs if decay is not None else []
        self.averages = nn.ModuleDict({name: average_weights(self.net_of(name), decay or 0.0) for name in runs})
        self.averaged_scores.update({name: self.task.scores() for name in runs})

    def average_of(self, run: str) -> nn.Module | None:
        """The net with the averages of a run's weights, if there are any."""
        return cast("AveragedModel", self.averages[run]).module if run in self.averages else None

    def on_train_start(self) -> None:
        self._averaged_step = self.global_step

    def on_train_batch_end(self, *_: Any) -> None:
        """Average the weights after each step of the optimizer, before a validation."""
        if self.global_step == self._averaged_step:
            return
        self._averaged_step = self.global_step
        for name in self.active_runs:
            if name in self.averages:
                cast("AveragedModel", self.averages[name]).update_parameters(self.net_of(name))
