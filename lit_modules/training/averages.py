"""Exponential moving averages of students' weights, beside the weights that are trained."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from apprentice.errors import BadInput
from lit_modules.training.extras import Extra

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop


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


class WeightAverages(Extra["Loop"]):
    """Keeps moving averages of the weights of a loop's runs, which are validated and tested beside these.

    Args:
        loop: of the runs, whose nets are as training begins.
        decay: of the averages.
    """

    def __init__(self, loop: "Loop", decay: float) -> None:
        self.averages = nn.ModuleDict({run: average_weights(loop.net_of(run), decay) for run in loop.runs})
        loop.run_scores.averaged.update({run: loop.task.scores() for run in loop.runs})
        self._averaged_step = 0  # up to which weights are averaged

    def on_train_start(self, loop: "Loop") -> None:
        self._averaged_step = loop.global_step

    def after_batch(self, loop: "Loop") -> None:
        """Average the weights after each step of the optimizer, before a validation."""
        if loop.global_step == self._averaged_step:
            return
        self._averaged_step = loop.global_step
        for run in loop.active_runs:
            cast("AveragedModel", self.averages[run]).update_parameters(loop.net_of(run))
