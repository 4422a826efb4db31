"""Accumulated batches of texts, which weigh by their tokens."""

from typing import TYPE_CHECKING

from torch import Tensor

from lit_modules.tasks.base import BatchSize
from lit_modules.training.extras import Extra

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop


class TokenAccumulation(Extra["Loop"]):
    """Makes the accumulated gradients of texts those of the mean over all of their tokens.

    Lightning has divided each batch's by the number of batches, of which the epoch's last step may have fewer. Those of
    samples stay so, as in torch's usual loop.
    """

    def __init__(self) -> None:
        self._tokens: list[float] = []  # that count in each batch since the last step

    def on_global_batch(self, loop: "Loop", size: BatchSize) -> None:
        self._tokens.append(size.values)

    def on_before_backward(self, loop: "Loop", loss: Tensor) -> None:
        """Weigh the gradients of a batch by its tokens, over those of the first batch."""
        if loop.trainer.accumulate_grad_batches > 1 and loss.requires_grad and any(self._tokens):
            weight = self._tokens[-1] / self._first
            if weight != 1:
                loss.register_hook(lambda gradient: gradient * weight)

    @property
    def _first(self) -> float:
        """Tokens of the first accumulated batch that has any."""
        return next(filter(None, self._tokens))

    def before_step(self, loop: "Loop") -> None:
        batches, total = loop.trainer.accumulate_grad_batches, sum(self._tokens)
        factor = batches * self._first / total if total and batches > 1 else 1.0
        self._tokens.clear()
        if factor != 1:
            for p in loop.parameters_of(loop.runs):
                if p.grad is not None:
                    p.grad.mul_(factor)
