"""The experiments as sub-commands of an installed package.

    apprentice kd --seeds 1    # what `python experiments/kd.py --seeds 1` does in a clone
    apprentice --version

Loads no library itself: each script prepares its process before torch is loaded.
"""

import difflib
import runpy
import sys
from pathlib import Path

from apprentice import __version__

SCRIPTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))}
USAGE = f"usage: apprentice {{{','.join(SCRIPTS)}}} [--FLAG VALUE ...]"


def main() -> None:
    """Run the script that the first argument names, with the arguments after it.

    Raises:
        SystemExit: with code 2 if there is no such script, otherwise with that of the script.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--version":
        print(f"apprentice {__version__}")
    elif name in {"-h", "--help"}:
        print(f"{USAGE}\n\n`apprentice NAME --help` describes the flags of an experiment.")
    elif name in SCRIPTS:
        script = str(SCRIPTS[name])
        sys.argv = [script, *sys.argv[2:]]
        runpy.run_path(script, run_name="__main__")
    else:
        near = difflib.get_close_matches(name, SCRIPTS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"error: {name or 'no experiment'}: expected one of {', '.join(SCRIPTS)}{hint}\n")
        raise SystemExit(2)


if __name__ == "__main__":
    main()
