"""Checks of the options of a search, which experiments have."""

from typing import Protocol

from apprentice.errors import BadInput
from harness import cli


class Options(Protocol):
    """The options of a search."""

    tune: int | None
    tune_seeds: int | list[int] | None
    tune_optimizer: bool | None
    tune_wave: int | None


def check_options(options: Options) -> None:
    """Fill in the defaults of a search; BadInput for values that can't be used, or without a search."""
    if options.tune is None:
        for name in ("tune_seeds", "tune_optimizer", "tune_wave"):
            if (value := getattr(options, name)) is not None:
                raise BadInput(name, value, "--tune N beside it")
        return
    if options.tune < 2:
        raise BadInput("tune", options.tune, "a number of settings of each method, at least 2")
    seeds = 2 if options.tune_seeds is None else options.tune_seeds
    if isinstance(seeds, int):
        if not 1 <= seeds <= cli.MOST_SEEDS:
            raise BadInput("tune_seeds", seeds, "a number of seeds, at least 1, or a list of them, as [7]")
        seeds = [cli.MOST_SEEDS + number for number in range(seeds)]  # `--seeds N` has smaller ones
    if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
        raise BadInput("tune_seeds", seeds, "seeds of 0 or more, none of them twice")
    options.tune_seeds, options.tune_optimizer = seeds, options.tune_optimizer is not False
    if options.tune_wave is not None and options.tune_wave < 1:
        raise BadInput("tune_wave", options.tune_wave, "a number of settings, at least 1")
