"""Random numbers that depend on the seed and on what is computed, whichever rank computes it."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from apprentice import keyed
from strategies.base.data_parallel import DataParallel

SPARE = np.random.MT19937(0)  # numpy's inside `seed_generators`: copying its usual generator's state takes longer


@contextmanager
def seed_generators(strategy: DataParallel, *numbers: int) -> Iterator[None]:
    """Seed torch, numpy and Python with the run's seed and these numbers; restore their states afterwards."""
    seed = getattr(strategy.lightning_module, "seed", None) or int(os.environ.get("PL_GLOBAL_SEED", "0"))
    key = keyed.fold_in(seed, *numbers)
    cuda = strategy.root_device.type == "cuda"
    python_state, numpy_generator = random.getstate(), get_bit_generator()
    set_bit_generator(SPARE)
    try:
        with torch.random.fork_rng([strategy.root_device] if cuda else []):
            torch.default_generator.manual_seed(key)
            if cuda:  # torch.manual_seed would note a call stack for an unused GPU
                torch.cuda.manual_seed(key)
            np.random.seed(key)  # noqa: NPY002 - others' modules draw from it
            random.seed(key)
            yield
    finally:
        set_bit_generator(numpy_generator)
        random.setstate(python_state)
