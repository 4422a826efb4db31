"""Data parallelism with a sharded optimizer state (Rajbhandari et al. 2020, "ZeRO", stage 1)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import LBFGS, Optimizer

from apprentice.errors import BadInput
from strategies.base import checkpoints
from strategies.base.gradients import copy_from, flatten, parameters_of
from strategies.ddp import DDP


class ZeRO1(DDP):
    """Each rank keeps the optimizer state of its share of the parameters, steps them and broadcasts them.

    The module's own optimizer stays in place, for schedulers: a rank clears the gradients of other shares after
    clipping. No tensor is cut: a share is at least as large as its largest parameter.
    BadInput for a loss scale or LBFGS, which need all gradients on all ranks.
    """

    _one_device = True
    saves_alone = False

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Assign the parameters to ranks, and drop the optimizer state of other ranks' shares."""
        super().setup_optimizers(trainer)
        if self._scales_loss or any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise BadInput("strategy", "ddp_zero1", "an optimizer other than LBFGS, and no loss scale")
        self._shares: list[list[nn.Parameter]] = [[] for _ in range(self.world_size)]
        self._drop_state()

    def _others(self) -> list[nn.Parameter]:
        """Return other ranks' parameters, after assigning new ones, such as a callback's, to the smallest shares."""
        known = {p for share in self._shares for p in share}
        loads = [sum(p.numel() for p in share) for share in self._shares]
        new = [p for p in parameters_of(*self.optimizers) if p not in known]
        for p in sorted(new, key=nn.Parameter.numel, reverse=True):
            least = loads.index(min(loads))
            self._shares[least].append(p)
            loads[least] += p.numel()
        return [p for rank, share in enumerate(self._shares) if rank != self.global_rank for p in share]

    def _drop_state(self) -> None:
        for optimizer in self.optimizers:
            for p in self._others():
                optimizer.state.pop(p, None)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step this rank's share, then exchange all shares."""
        if self.world_size == 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loss = self.precision_plugin._wrap_closure(self._module, optimizer, closure)
        for p in self._others():
            p.grad = None
        optimizer.step(**kwargs)
        for rank, share in enumerate(self._shares):
            if share:
                dist.broadcast(vector := flatten(share), rank)
                copy_from(vector, share)
        return loss

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state, in the layout of one device, on rank zero; collective."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state if self.world_size == 1 else checkpoints.gather_states(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole state and keep this rank's share."""
        super().load_optimizer_state_dict(checkpoint)
        self._drop_state()
