"""A loss scale for each run, so that one run's overflow does not cost another run a step."""

import copy
import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from apprentice import replicas
from apprentice.errors import BadInput

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop

HOPELESS = 2.0**-24  # gradients of 1e12 fit into float16 at this scale: a smaller one will not help


class LossScales:
    """Copies of the precision plugin's `torch.amp.GradScaler`, one for each run, which replace it during a fit.

    They scale losses, find infinite gradients and update the scales. `GradScaler.step` is not used: it steps or skips a
    whole optimizer, and a run is one group of the only optimizer.
    """

    def __init__(self) -> None:
        self.scalers: dict[str, GradScaler] = {}
        self._state: dict[str, dict[str, Any]] = {}  # of scalers that are not made yet, or already removed

    def take_over(self, plugin: Any, runs: Iterable[str]) -> None:
        """Replace the plugin's scaler, if it has one, by one for each run; BadInput if that would round gradients."""
        stock: Any = getattr(plugin, "scaler", None) or getattr(plugin, "resting_scaler", None)
        self.scalers = {}
        if stock is None or not stock.is_enabled():
            return
        factors = stock.get_scale(), stock.get_growth_factor(), stock.get_backoff_factor()
        if any(math.frexp(factor)[0] != 0.5 for factor in factors):
            raise BadInput("", f"GradScaler with scale, growth and backoff {factors}", "powers of two")
        self.scalers = {run: copy.deepcopy(stock) for run in runs}
        self.load_state_dict(self._state)
        plugin.scaler, plugin.resting_scaler = None, stock

    def give_back(self, plugin: Any) -> None:
        """Restore the plugin's own scaler."""
        if self.scalers:
            self._state, self.scalers = self.state_dict(), {}
            plugin.scaler = plugin.resting_scaler

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of each run's scaler, as plain numbers."""
        return self._state | {run: scaler.state_dict() for run, scaler in self.scalers.items()}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Restore the scalers, now or in `take_over`; a run that is not in `state` starts with a new one."""
        self._state = dict(state)
        for run in state.keys() & self.scalers.keys():
            self.scalers[run].load_state_dict(state[run])

    def scaled(self, run: str, loss: Tensor) -> Tensor:
        """A run's loss with its value unchanged, whose gradient will be multiplied by the scale."""
        if run in self.scalers and loss.requires_grad:
            loss = loss.float()
            loss.register_hook(self.scalers[run].scale)
        return loss

    def unscale_runs(self, loop: "Loop") -> list[str]:
        """Unscale the gradients of a loop's runs that are alive; return those that overflowed, which may then fail."""
        alive = {run: group for run, group in loop.parameter_groups().items() if run not in loop.inactive}
        overflowed = self.unscale(alive, loop.trainer.strategy.root_device)
        for run in overflowed:
            if self.scalers[run].get_scale() < HOPELESS:
                loop.fail(run, "gradient")
        return overflowed

    @torch.no_grad()
    def unscale(self, parameters: Mapping[str, Iterable[nn.Parameter]], device: torch.device) -> list[str]:
        """Unscale these runs' gradients and update the scales; returns runs with one not finite on any rank."""
        overflows: dict[str, list[Tensor]] = {}  # of a run a flag for each device
        for run, group in parameters.items():
            if held := [_local(p) for p in group if p.grad is not None]:
                seen: Any = SimpleNamespace(param_groups=[{"params": held}])  # all that GradScaler reads
                self.scalers[run].unscale_(seen)
                overflows[run] = list(self.scalers[run]._found_inf_per_device(seen).values())
        if not overflows:
            return []
        counts = torch.stack([torch.stack([flag.to(device) for flag in flags]).sum() for flags in overflows.values()])
        anywhere = dict(zip(overflows, replicas.all_reduce_sum(counts).tolist(), strict=True))
        for run, flags in overflows.items():
            for flag in flags:
                flag.fill_(anywhere[run])
            self.scalers[run].update()
        return [run for run, count in anywhere.items() if count]


def _local(parameter: nn.Parameter) -> Tensor:
    """A parameter with its gradient; for a DTensor, this rank's part of both."""
    gradient = parameter.grad
    if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
        return parameter
    local: Tensor = parameter.to_local().detach()
    local.grad = gradient.to_local()
    return local
