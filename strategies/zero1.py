"""Data parallelism with the optimizer's state cut into shares (Rajbhandari et al. 2020, "ZeRO", stage 1)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import LBFGS, Optimizer

from strategies.base import checkpoints
from strategies.ddp import DDP


class ZeRO1(DDP):
    """Each rank steps its share of the parameters, whose optimizer state only it has, and sends them to the others.

    The module's own optimizer stays in place: a parameter without a gradient takes no step and has no state, so a rank
    lets go of the gradients that are not its own once they are clipped. (torch's ZeroRedundancyOptimizer would replace
    the optimizer under schedulers that hold it.) No tensor is cut: a share is at least the largest of its parameters.

    Raises:
        ValueError: a loss scale or LBFGS, which need all gradients on all ranks.
    """

    def _on_several_devices(self) -> bool:
        return False

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Deal the parameters to the ranks, and let go of what is kept for those of others."""
        super().setup_optimizers(trainer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers) or (scaler and scaler.is_enabled()):
            raise ValueError("strategy ddp_zero1: expected an optimizer other than LBFGS, and no loss scale")
        self._shares: list[list[nn.Parameter]] = [[] for _ in range(self.world_size)]
        self._drop_state()

    def _deal(self) -> None:
        """Deal the parameters that no rank has yet: the largest first, each to the rank that has least."""
        dealt = {p for share in self._shares for p in share}
        loads = [sum(p.numel() for p in share) for share in self._shares]
        new = [p for p in _parameters(self.optimizers) if p not in dealt]
        for p in sorted(new, key=nn.Parameter.numel, reverse=True):
            least = loads.index(min(loads))
            self._shares[least].append(p)
            loads[least] += p.numel()

    def _others(self) -> list[nn.Parameter]:
        self._deal()  # a callback may have given an optimizer more
        return [p for rank, share in enumerate(self._shares) if rank != self.global_rank for p in share]

    def _drop_state(self) -> None:
        for optimizer in self.optimizers:
            for p in self._others():
                optimizer.state.pop(p, None)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Step this rank's share, then bring all parameters up to date."""
        if self.world_size == 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loss = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)  # type: ignore[arg-type]
        for p in self._others():
            p.grad = None
        optimizer.step(**kwargs)
        self._send()
        return loss

    @torch.no_grad()
    def _send(self) -> None:
        packed = [torch.cat([p.flatten() for p in share]) for share in self._shares if share]
        for rank, vector in enumerate(packed):
            dist.broadcast(vector, rank)
        for share, vector in zip(self._shares, packed, strict=False):
            for p, values in zip(share, vector.split([p.numel() for p in share]), strict=True):
                p.copy_(values.view_as(p))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank zero the whole state, as one device would have it; collective."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state if self.world_size == 1 else checkpoints.gathered(state, self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole state and keep this rank's share."""
        super().load_optimizer_state_dict(checkpoint)
        self._drop_state()


def _parameters(optimizers: list[Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
