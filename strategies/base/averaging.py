"""Averaging the gradients of parameters that are frozen or unfrozen during a fit."""

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn

from strategies.base.data_parallel import DataParallel


class AveragesGradients(DataParallel):
    """Data parallelism that has to know in advance whose gradients it averages; `_averaged` holds these parameters."""

    _averaged: set[nn.Parameter] | None = None  # None: there is nothing to know

    def _ever_trained(self) -> set[nn.Parameter]:
        """The parameters that require a gradient or have required one in this fit."""
        known = self._averaged or set()
        return {p for p in self._module.parameters() if p.requires_grad or p in known}

    def _unknown(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient which is not averaged."""
        if self._averaged is None:
            return {}
        parameters = self._module.named_parameters()
        return {name: p for name, p in parameters if p.requires_grad and p not in self._averaged}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Average unfrozen parameters from now on; frozen ones stay known, as they may be trained again."""
        if self._unknown():
            self._average_more(batch_idx)

    def _average_more(self, batch_idx: int) -> None:
        """Average the gradients of all of `_ever_trained` from this batch on."""
        raise NotImplementedError

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that no parameter was unfrozen since the batch started: its gradient would not be averaged."""
        if unknown := self._unknown():
            expected = "expected it to be unfrozen in on_train_batch_start or earlier, as its gradient is not averaged"
            raise ValueError(f"parameter {next(iter(unknown))}: {expected}")
        super().pre_backward(closure_loss)

    def setup(self, trainer: Trainer) -> None:
        """Set the module up."""
        self._averaged = None
        super().setup(trainer)
