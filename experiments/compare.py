"""Finished runs side by side: one table, what differs between the runs, all settings, and one picture.

    python experiments/compare.py runs/t4 runs/t8
    python experiments/compare.py runs/t4 runs/t8 --out runs/temperatures

Runs of kd.py or of gpt.py; those of gpt.py also with those of kd.py on texts. A row for each student or language model:
the test metric over seeds, and the paired difference to the first run's `ce` (its language model) with its 95 %
interval, where both runs had the same data and have seeds in common. No verdict is given where runs differ in other
settings than those of the methods. Reads the runs' records, no data; takes seconds.
With --pool, runs of kd.py that differ in their seeds alone become one run with all of these seeds.
"""

from harness import start

if __name__ == "__main__":
    start.script()

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from apprentice.errors import BadInput
from harness.cli.messages import with_flag
from harness.cli.sources import expand_home
from harness.reports.bakeoff import texts
from harness.runs import environment
from harness.start import called_as, console
from harness.studies import compare as comparison


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every experiment does."""

    def error(self, message: str) -> NoReturn:
        """Print the line and end with exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the runs that the command line names."""
    parser = Parser(
        called_as("compare.py"),
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=expand_home, metavar="RUN", help="folder of a finished run")
    where = "where the results go; by default a folder under runs/compare/"
    parser.add_argument("--out", type=expand_home, metavar="FOLDER", help=where)
    parser.add_argument(
        "--pool", action="store_true", help="runs that differ in their seeds alone: one table of all seeds"
    )
    with console():
        arguments = parser.parse_intermixed_args(argv)
        try:
            runs = comparison.load_runs(arguments.runs)
            again = [line for run in runs for line in environment.commands(run.folder)]
            again.append(environment.command("compare.py", sys.argv[1:] if argv is None else argv))
            if arguments.pool:
                results = comparison.pool(runs)
                saved = comparison.save_pool(results, arguments.out, again)
                print(f"{texts.text(results)}\n\n{saved}/report.html, results.md, .png, .json")
                return
            compared = comparison.compare(runs)
            folder = comparison.save(compared, arguments.out, again)
        except BadInput as error:
            parser.error(with_flag(error).removeprefix("--RUN "))  # the runs are given without a flag
        print(comparison.text(compared))
        print(f"\nSaved report.html, compare.md, .png and .json in {folder}")


if __name__ == "__main__":
    start.run(main)
