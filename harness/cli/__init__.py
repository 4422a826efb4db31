"""The command line of an experiment: flags and YAML to classes and their options, errors in one line.

The first pass finds the classes that flags and files choose; in the second jsonargparse reads their options.
"""

from harness.cli.classes import Choice, Classes, arguments, build, factory, refusals
from harness.cli.declarations import Group, Names
from harness.cli.messages import argv_of, as_flags, one_line_errors, with_flag
from harness.cli.options import COUNT, SECONDS, Limit, Options, at_least, option
from harness.cli.parser import Parser
from harness.cli.resolver import choose
from harness.cli.resuming import CALL, FREE, GROWS, OnResume
from harness.cli.signatures import options_of

__all__ = [
    "CALL", "COUNT", "FREE", "GROWS", "SECONDS", "Choice", "Classes", "Group", "Limit", "Names", "OnResume",
    "Options", "Parser", "arguments", "argv_of", "as_flags", "at_least", "build", "choose", "factory",
    "one_line_errors", "option", "options_of", "refusals", "with_flag",
]  # fmt: skip
