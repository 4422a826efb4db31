"""Random states and buffers that a rank keeps for itself."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from apprentice import keyed


class RankRandomState:
    """A state of torch's CPU generator for one rank's layers; samplers draw from another, equal on all ranks."""

    def __init__(self, rank: int) -> None:
        self._state = torch.Generator().manual_seed(keyed.fold_in(torch.initial_seed(), rank)).get_state()
        self.drawn = False  # whether the last block drew any numbers

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, torch's CPU generator continues where the last block stopped."""
        with torch.random.fork_rng([]):
            torch.set_rng_state(before := self._state)
            yield
            self._state = torch.get_rng_state()
            self.drawn = not torch.equal(self._state, before)


@contextmanager
def preserve_state(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore the modules' buffers and torch's random states afterwards."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in buffers:
        buffer.data.copy_(value)
