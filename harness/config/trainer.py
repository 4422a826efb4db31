"""Values of the Trainer's options with which nothing is trained, or which mean nothing, and Lightning takes."""

from collections.abc import Mapping
from typing import Any

from apprentice.errors import BadInput

AT_LEAST = {
    "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0, "limit_val_batches": 0,
    "log_every_n_steps": 0, "min_epochs": 0, "min_steps": 0,
}  # fmt: skip
ABOVE_ZERO = ("limit_train_batches", "limit_test_batches", "val_check_interval")
FRACTIONS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")
LIMITS = ("epochs", "steps")


def check_trainer(options: Mapping[str, Any]) -> None:
    """See that the Trainer trains, validates and logs as its options say.

    Raises:
        BadInput: naming the first option with which it would not.
    """
    for name, least in AT_LEAST.items():
        if _number(value := options[name]) and not value >= least:
            raise BadInput(f"trainer.{name}", value, f"a number, at least {least}")
    for name in ABOVE_ZERO:
        if _number(value := options[name]) and not value > 0:
            raise BadInput(f"trainer.{name}", value, "a number above 0")
    for name in FRACTIONS:
        if isinstance(value := options[name], float) and value > 1:
            raise BadInput(f"trainer.{name}", value, "a whole number of batches, or a fraction of them, up to 1.0")
    for what in LIMITS:
        least, most = options[f"min_{what}"], options[f"max_{what}"]
        if most is None or most == -1:
            continue
        if most < 1:
            raise BadInput(f"trainer.max_{what}", most, f"a number of {what}, at least 1, or -1 for no limit")
        if least is not None and least > most:
            raise BadInput(f"trainer.min_{what}", least, f"at most --trainer.max_{what}, {most}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float)
