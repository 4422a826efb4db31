"""Which of torch's random numbers are a stage's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnNoise:
    """A state of torch's generator for the layers of one rank.

    Ranks have different layers. Were these to draw from the state that samplers and collate functions draw from, ranks
    would soon read different batches.

    Attributes:
        drawn: whether the last block has drawn anything.

    Args:
        seed: another one on each rank.
    """

    def __init__(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()
        self.drawn = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, torch's generator on the CPU goes on from where the last block has left it."""
        outside, before = torch.get_rng_state(), self._state
        torch.set_rng_state(before)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            self.drawn = not torch.equal(self._state, before)
            torch.set_rng_state(outside)
