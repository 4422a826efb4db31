"""What training and evaluation under `exact` share: this rank's replica, and random states."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from lightning.pytorch import LightningModule
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from apprentice import keyed
from strategies.base.data_parallel import DataParallel


class ExactBase(DataParallel):
    """Holds the number of shards."""

    exact: int | None  # None for plain data parallelism

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica of the module, and the number of replicas."""
        return self.global_rank, self.num_processes * self.num_nodes

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @contextmanager
    def _seeded(self, *numbers: int) -> Iterator[None]:
        """Seed torch, numpy and Python with the run's seed and these numbers; restore their states afterwards."""
        seed = getattr(self.lightning_module, "seed", None) or int(os.environ.get("PL_GLOBAL_SEED", "0"))
        key = keyed.fold_in(seed, *numbers)
        cuda = self.root_device.type == "cuda"
        python_state, numpy_generator = random.getstate(), get_bit_generator()
        set_bit_generator(_spare())  # to copy numpy's state would take longer than all else here
        try:
            with torch.random.fork_rng([self.root_device] if cuda else []):
                torch.default_generator.manual_seed(key)
                if cuda:  # torch.manual_seed would note a call stack for an unused GPU
                    torch.cuda.manual_seed(key)
                np.random.seed(key)  # noqa: NPY002 - others' modules draw from it
                random.seed(key)
                yield
        finally:
            set_bit_generator(numpy_generator)
            random.setstate(python_state)


@cache
def _spare() -> np.random.MT19937:
    return np.random.MT19937(0)
