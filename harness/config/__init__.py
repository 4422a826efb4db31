"""The command line of an experiment: flags and YAML to classes and their options, errors in one line.

Constructor signatures are the configuration. First the classes are found that flags and files choose, then jsonargparse
reads the options of each: so an option that a class does not set starts from this class's own default.
"""

from harness.config.classes import Choice, arguments, build, factory, refusals
from harness.config.messages import one_line_errors
from harness.config.options import OneSeedOptions, RunOptions
from harness.config.parser import Parser, pick
from harness.config.training import Names, Strategies

__all__ = [
    "Choice", "Names", "OneSeedOptions", "Parser", "RunOptions", "Strategies", "arguments", "build", "factory",
    "one_line_errors", "pick", "refusals",
]  # fmt: skip
