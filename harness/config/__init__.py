"""The command line of an experiment: flags and YAML to classes and their options; what is wrong is said in one line.

Constructor signatures are the configuration: jsonargparse reads them and checks types. Three things are done here, as
it would do them otherwise: a class that is chosen anew starts from its own defaults (jsonargparse carries Adam's weight
decay of 0 over to AdamW, whose own is 0.01), files merge into named defaults, and messages name flags and what is near.
"""

from harness.config.building import arguments, build, factory, refusals
from harness.config.choices import Choice
from harness.config.faults import one_line_errors
from harness.config.options import OneSeedOptions, RunOptions
from harness.config.parser import Parser, pick
from harness.config.strategy_names import Names, Strategies

__all__ = [
    "Choice", "Names", "OneSeedOptions", "Parser", "RunOptions", "Strategies", "arguments", "build", "factory",
    "one_line_errors", "pick", "refusals",
]  # fmt: skip
