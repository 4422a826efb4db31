"""The options of a search, which experiments have."""

from dataclasses import dataclass

from harness.cli import FREE, at_least, option
from harness.runs.options import MOST_SEEDS, RunOptions, list_seeds

TUNE = {"tune": "N"}


@dataclass
class TuningOptions(RunOptions):
    """Options of a search; its defaults are filled in where there is one."""

    tune: int | None = option(None, at_least(2, "settings of each method"))
    """compare the best of N settings of each method; `search.kd.kd_weight log(1,16)`."""
    tune_seeds: int | list[int] | None = option(None, needs=TUNE)
    """how many seeds the search has, or a list of them, as [7,8]; default: 2."""
    tune_optimizer: bool | None = option(None, needs=TUNE)
    """search learning rate and weight decay, too; default: true."""
    tune_wave: int | None = option(None, at_least(1, "settings"), needs=TUNE, on_resume=FREE)
    """settings that train side by side, at most; default: what memory holds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune is not None:
            seeds = 2 if self.tune_seeds is None else self.tune_seeds
            self.tune_seeds = list_seeds("tune_seeds", seeds, first=MOST_SEEDS)  # `seeds N` has smaller ones
            self.tune_optimizer = self.tune_optimizer is not False
