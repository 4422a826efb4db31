"""Post-local SGD: parameters are averaged every k steps, gradients never (Lin et al. 2020)."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.optim import Optimizer

from apprentice.contract import layout_of
from apprentice.errors import BadInput
from strategies.ddp import DDP, SET_BY_HOOK


class LocalSGD(DDP):
    """Ranks step by their own gradients and average their parameters after every `period` steps.

    With `period` 1 and plain SGD this is DDP; with momentum or Adam it is not, as each rank's moments are its own.
    Validation, checkpoints and the end use the average, of the moments too, and a resumed run starts from it. A
    module's own collectives, such as those of BatchNorm over the global batch, still run at every step.

    Args:
        period: optimizer steps between two averagings.
        warmup_steps: first steps, in which gradients are averaged.
    """

    _one_device = True
    saves_alone = False
    _relates_rows = False

    def __init__(self, *, period: int = 4, warmup_steps: int = 0, **kwargs: Any) -> None:
        self._refuse(kwargs, *SET_BY_HOOK)
        state = PostLocalSGDState(None, None, warmup_steps, post_local_gradient_allreduce=False)
        super().__init__(exact=None, ddp_comm_hook=post_localSGD_hook, ddp_comm_state=state, **kwargs)
        if period < 1:
            raise BadInput("period", period, "at least 1")
        if warmup_steps < 0:
            raise BadInput("warmup_steps", warmup_steps, "0 or more")
        self.period, self.warmup_steps = period, warmup_steps
        self._local_parameters: list[Tensor] = []  # while the module has the average

    def check_module(self, module: LightningModule) -> None:
        super().check_module(module)
        if unless := layout_of(module).equal_weights_unless:
            raise BadInput("strategy", type(self).__name__, f"{unless}, or another: ranks have other weights")

    def _enable_model_averaging(self) -> None:
        """Not used: Lightning's averaging restarts its count of steps after a resume."""

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> None:
        """Return None: gradients are never averaged, and a rank's are not those of the global batch."""

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p in (self._averaged or ())]

    def _average(self) -> None:
        parameters = self._parameters()
        if parameters and self.world_size > 1 and dist.is_initialized():
            average_parameters(iter(parameters), dist.group.WORLD)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        """Continue the count of warm-up steps after a resume."""
        assert isinstance(self._ddp_comm_state, PostLocalSGDState)
        self._ddp_comm_state.iter = self._trainer.global_step

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        steps = self._trainer.global_step + 1 - self.warmup_steps
        if steps > 0 and steps % self.period == 0:
            self._average()
        return result

    def on_train_end(self) -> None:
        self._average()

    def on_validation_start(self) -> None:
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._load_average()

    def _load_average(self) -> None:
        self._local_parameters = [p.detach().clone() for p in self._parameters()]
        self._average()

    @torch.no_grad()
    def on_validation_end(self) -> None:
        """Restore this rank's parameters."""
        for p, values in zip(self._parameters(), self._local_parameters, strict=False):
            p.copy_(values)
        self._local_parameters = []

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with averaged parameters; collective."""
        self._load_average()
        state = deepcopy(super().lightning_module_state_dict())
        self.on_validation_end()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with averaged moments; collective."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        for moments in state["state"].values():
            for key, x in moments.items():
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    # From the CPU, too, where the state is once a forked fit has ended: NCCL knows GPUs alone.
                    mean: Tensor = self.reduce(x.to(self.root_device, copy=True), reduce_op="mean")
                    moments[key] = mean.to(x.device)
        return state
