"""The command line of an experiment: flags and YAML to classes and their options, errors in one line.

First the classes are found that flags and files choose; then jsonargparse reads the options of each one's constructor.
"""

from harness.config.classes import Choice, arguments, build, factory, refusals
from harness.config.messages import one_line_errors
from harness.config.options import MOST_SEEDS, OneSeedOptions, RunOptions
from harness.config.parser import Parser
from harness.config.rows import Row, chosen, flags_of, pick, rows
from harness.config.training import Names, Strategies

__all__ = [
    "MOST_SEEDS", "Choice", "Names", "OneSeedOptions", "Parser", "Row", "RunOptions", "Strategies", "arguments",
    "build", "chosen", "factory", "flags_of", "one_line_errors", "pick", "refusals", "rows",
]  # fmt: skip
