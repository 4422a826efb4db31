"""A Trainer's limits of batches, in samples."""

import math

from lightning.pytorch import Trainer

from apprentice.errors import BadInput

LIMITS = {"train": "limit_train_batches", "validation": "limit_val_batches", "test": "limit_test_batches"}


def count_in_limit(trainer: Trainer | None, part: str, count: int, size: int) -> int:
    """Return how many of `count` samples, in batches of `size`, are within a Trainer's limit for a part of the data.

    The limit is an int, a count of batches, or a float, a fraction; BadInput if it is less than a batch.
    """
    limit = getattr(trainer, LIMITS[part], 1.0)
    whole = math.ceil(count / size)
    batches = min(whole, limit) if isinstance(limit, int) else int(whole * limit)
    if whole and limit and not batches:
        expected = f"at least one batch: a count, as 1, or a fraction of the {whole}, at least {1 / whole:.3g}"
        raise BadInput(f"trainer.{LIMITS[part]}", limit, expected)
    return min(batches * size, count)
