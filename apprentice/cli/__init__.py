"""The command line of an experiment: flags and YAML to classes and their options; what is wrong is said in one line.

Constructor signatures are the configuration: jsonargparse reads them and checks types. Choosing classes, merging flags and files by
name, and naming the whole flag in each message is done here: a class that is chosen anew starts from its own defaults (jsonargparse
would carry Adam's weight decay over to AdamW).
"""

from apprentice.cli.building import arguments, build, factory
from apprentice.cli.choices import Choice
from apprentice.cli.faults import one_line_errors
from apprentice.cli.parser import Parser, pick
from apprentice.cli.run_options import RunOptions

__all__ = ["Choice", "Parser", "RunOptions", "arguments", "build", "factory", "one_line_errors", "pick"]
