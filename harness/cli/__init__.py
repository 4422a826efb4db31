"""The command line of an experiment: flags and YAML to classes and their options, errors in one line.

The first pass finds the classes that flags and files choose; in the second jsonargparse reads their options.
"""

from harness.cli.classes import Choice, Classes, arguments, build, factory, refusals
from harness.cli.messages import one_line_errors, with_flag
from harness.cli.metrics import MetricClasses
from harness.cli.options import MOST_SEEDS, OneSeedOptions, RunOptions
from harness.cli.parser import Parser
from harness.cli.resolver import choose
from harness.cli.resuming import CALL, FREE, GROWS, OnResume
from harness.cli.rows import Row, choice_at, pick, rows
from harness.cli.training import Strategies, scheduler_factory

__all__ = [
    "CALL", "FREE", "GROWS", "MOST_SEEDS", "Choice", "Classes", "MetricClasses", "OnResume", "OneSeedOptions",
    "Parser", "Row", "RunOptions", "Strategies", "arguments", "build", "choice_at", "choose", "factory",
    "one_line_errors", "pick", "refusals", "rows", "scheduler_factory", "with_flag",
]  # fmt: skip
