"""Post-local SGD: parameters are averaged every k steps, gradients never (Lin et al. 2020)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.optim import Optimizer

from strategies.base.replicated import HOOK, Replicated


class LocalSGD(Replicated):
    """Ranks step by their own gradients and average their parameters after every `period` steps.

    With `period` 1 and plain SGD this is DDP; with momentum or Adam it is not, as each rank's moments are its own.
    Validation, checkpoints and the end see the average, of the moments too; a run goes on from it. What a module
    computes together, BatchNorm over the global batch among it, is still sent at every step.

    Args:
        period: optimizer steps from one averaging to the next.
        warmup_steps: steps at the start in which gradients are averaged.
        **kwargs: Replicated's.

    Raises:
        ValueError: an option's value can't be used.
    """

    def __init__(self, *, period: int = 4, warmup_steps: int = 0, **kwargs: Any) -> None:
        self._refuse(kwargs, *HOOK)
        state = PostLocalSGDState(None, None, warmup_steps, post_local_gradient_allreduce=False)
        super().__init__(ddp_comm_hook=post_localSGD_hook, ddp_comm_state=state, **kwargs)
        if period < 1:
            raise ValueError(f"period {period}: expected at least 1")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps {warmup_steps}: expected 0 or more")
        self.period, self.warmup_steps = period, warmup_steps
        self._own: list[Tensor] = []

    def _on_several_devices(self) -> bool:
        return False

    def _enable_model_averaging(self) -> None:
        """Lightning's own, which counts its steps anew after a resume, is not used."""

    def _parameters(self) -> list[nn.Parameter]:
        assert self.lightning_module is not None
        averaged = self._averaged or set()
        return [p for p in self.lightning_module.parameters() if p in averaged]

    def _average(self) -> None:
        parameters = self._parameters()
        if parameters and self.world_size > 1 and dist.is_initialized():
            average_parameters(iter(parameters), dist.group.WORLD)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        """Count warm-up steps on after a resume."""
        assert self.lightning_module is not None
        assert isinstance(self._ddp_comm_state, PostLocalSGDState)
        self._ddp_comm_state.iter = self.lightning_module.trainer.global_step

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Step, and average if it is time."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        steps = self.lightning_module.trainer.global_step + 1 - self.warmup_steps
        if steps > 0 and steps % self.period == 0:
            self._average()
        return result

    # What others see is the average

    def on_train_end(self) -> None:
        """End with the average."""
        self._average()

    def on_validation_start(self) -> None:
        """Validate the average, while a fit runs."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._show_average()

    def _show_average(self) -> None:
        self._own = [p.detach().clone() for p in self._parameters()]
        self._average()

    @torch.no_grad()
    def on_validation_end(self) -> None:
        """Go on with this rank's own parameters."""
        for p, own in zip(self._parameters(), self._own, strict=False):
            p.copy_(own)
        self._own = []

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with averaged parameters; collective."""
        self._show_average()
        state = {
            key: x.clone() if isinstance(x, Tensor) else x for key, x in super().lightning_module_state_dict().items()
        }
        self.on_validation_end()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state with averaged moments; collective."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        for moments in state["state"].values():
            for key, x in moments.items():
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    moments[key] = self.reduce(x.clone(), reduce_op="mean")
        return state
