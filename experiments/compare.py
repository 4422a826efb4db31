"""Finished runs side by side: one table with a line for each run's student, and one picture.

    python experiments/compare.py runs/t4 runs/t8
    python experiments/compare.py runs/t4 runs/t8 --out runs/temperatures

Test accuracy over seeds (of texts: bits per character), and the paired difference to the first run's `ce` with its
95 % interval, where both runs had the same data and have seeds in common. Settings other than the methods' own in which
runs differ are listed, and no verdict is given then. Reads only the runs' results.json; a second or two on any machine.
"""

from harness import start

if __name__ == "__main__":
    start.script()

import argparse
from collections.abc import Sequence
from typing import NoReturn

from apprentice.errors import BadInput
from harness.console import console
from harness.studies import compare as comparison


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every experiment does."""

    def error(self, message: str) -> NoReturn:
        """Print the line and end with exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the runs that the command line names."""
    parser = Parser(
        "compare.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--out", metavar="FOLDER", help="where the results go; by default a folder under runs/compare/")
    with console():
        arguments = parser.parse_intermixed_args(argv)
        try:
            compared = comparison.compare(comparison.load_runs(arguments.runs))
            folder = comparison.save(compared, arguments.out)
        except BadInput as error:
            parser.error(str(error).removeprefix("--RUN "))  # the runs are given without a flag
        print(comparison.text(compared))
        print(f"\nSaved compare.md, compare.png and compare.json in {folder}")


if __name__ == "__main__":
    main()
