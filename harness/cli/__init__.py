"""The command line of an experiment: flags and YAML to classes and their options, errors in one line.

The first pass finds the classes that flags and files choose; in the second jsonargparse reads their options.
"""

from harness.cli.arm_names import ArmName, arm_names, choice_at, pick
from harness.cli.classes import Choice, Classes, arguments, build, factory, refusals
from harness.cli.declarations import Group
from harness.cli.messages import argv_of, as_flags, one_line_errors, with_flag
from harness.cli.options import COUNT, EXACT, MOST_SEEDS, SECONDS, Limit, OneSeedOptions, RunOptions, at_least, option
from harness.cli.parser import Parser
from harness.cli.resolver import choose
from harness.cli.resuming import CALL, FREE, GROWS, OnResume
from harness.cli.training import Strategies, scheduler_factory

__all__ = [
    "CALL", "COUNT", "EXACT", "FREE", "GROWS", "MOST_SEEDS", "SECONDS", "ArmName", "Choice", "Classes", "Group",
    "Limit", "OnResume", "OneSeedOptions", "Parser", "RunOptions", "Strategies", "arguments", "argv_of", "arm_names",
    "as_flags", "at_least", "build", "choice_at", "choose", "factory", "one_line_errors", "option", "pick", "refusals",
    "scheduler_factory", "with_flag",
]  # fmt: skip
