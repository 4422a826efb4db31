"""A loss scale for each run, so that one run's overflow is no other run's lost step."""

import copy
import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.amp import GradScaler

from apprentice import replicas

HOPELESS = 2.0**-24  # gradients of 1e12 fit into float16 at this scale: what is not finite then never will be


class LossScales:
    """Copies of the precision plugin's `torch.amp.GradScaler`, one a run; the plugin's own rests while they work.

    GradScaler multiplies, finds what is not finite and moves the scale. Only its `step` is not used, as that is an
    optimizer's, whole or not at all, and a run is one group of the only optimizer.
    """

    def __init__(self) -> None:
        self.scalers: dict[str, GradScaler] = {}
        self._state: dict[str, dict[str, Any]] = {}  # of scalers that are not there yet, or not any more

    def take_over(self, plugin: Precision, runs: Iterable[str]) -> None:
        """Do for each run what the plugin would do for all together; nothing if its precision needs no scale.

        Raises:
            ValueError: the scale isn't always a power of two, so that it would round gradients.
        """
        stock: Any = getattr(plugin, "scaler", None) or getattr(plugin, "resting_scaler", None)
        self.scalers = {}
        if stock is None or not stock.is_enabled():
            return
        factors = stock.get_scale(), stock.get_growth_factor(), stock.get_backoff_factor()
        if any(math.frexp(factor)[0] != 0.5 for factor in factors):
            raise ValueError(f"GradScaler with scale, growth and backoff {factors}: expected powers of two")
        self.scalers = {run: copy.deepcopy(stock) for run in runs}
        self.load_state_dict(self._state)
        plugin.scaler, plugin.resting_scaler = None, stock  # type: ignore[attr-defined]

    def give_back(self, plugin: Precision) -> None:
        """Let the plugin's own scaler work again, for whatever its Trainer fits next."""
        if self.scalers:
            self._state, self.scalers = self.state_dict(), {}
            plugin.scaler = plugin.resting_scaler  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Each run's scale and what moves it, as plain numbers."""
        return self._state | {run: scaler.state_dict() for run, scaler in self.scalers.items()}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Go on from there, now or when taking over; a run that is not in it begins anew."""
        self._state = dict(state)
        for run in state.keys() & self.scalers.keys():
            self.scalers[run].load_state_dict(state[run])

    def scaled(self, run: str, loss: Tensor) -> Tensor:
        """A run's loss: its value stays as it is, the gradient that comes back to it is multiplied."""
        if run in self.scalers and loss.requires_grad:
            loss = loss.float()
            loss.register_hook(self.scalers[run].scale)
        return loss

    @torch.no_grad()
    def unscale(self, parameters: Mapping[str, Iterable[nn.Parameter]], device: torch.device) -> list[str]:
        """Divide these runs' gradients by their scales, then move the scales; the same on all ranks.

        Args:
            parameters: of each run that still trains.
            device: where ranks exchange tensors.

        Returns:
            The runs that can't step: a gradient is not finite on some rank.
        """
        found: dict[str, list[Tensor]] = {}
        for run, group in parameters.items():
            if held := [_local(p) for p in group if p.grad is not None]:
                seen: Any = SimpleNamespace(param_groups=[{"params": held}])  # what GradScaler asks of an optimizer
                self.scalers[run].unscale_(seen)
                found[run] = list(self.scalers[run]._found_inf_per_device(seen).values())
        if not found:
            return []
        here = torch.stack([torch.stack([flag.to(device) for flag in flags]).sum() for flags in found.values()])
        anywhere = dict(zip(found, replicas.all_reduce_sum(here).tolist(), strict=True))
        for run, flags in found.items():
            for flag in flags:
                flag.fill_(anywhere[run])
            self.scalers[run].update()
        return [run for run, count in anywhere.items() if count]

    def hopeless(self, run: str) -> bool:
        """Whether its scale has shrunk so far that the scale can't be what keeps the run from stepping."""
        return self.scalers[run].get_scale() < HOPELESS


def _local(parameter: nn.Parameter) -> Tensor:
    """A parameter with its gradient; of a DTensor, the part of both that is on this rank."""
    if not hasattr(parameter, "to_local"):
        return parameter
    local = parameter.to_local().detach()
    local.grad = parameter.grad.to_local()  # type: ignore[union-attr]
    return local
