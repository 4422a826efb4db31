"""Finished runs side by side: their rows in one table, what differs between them, and all their settings."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from apprentice.errors import BadInput
from harness.runs.records import reading
from harness.studies.compare.comparison import compare
from harness.studies.compare.page import save, text
from harness.studies.compare.pool import pool
from harness.studies.compare.pool import save as save_pool
from harness.studies.compare.runs import FinishedRun, load_run

__all__ = ["FinishedRun", "compare", "load_runs", "pool", "save", "save_pool", "text"]


def load_runs(folders: Sequence[str | Path]) -> list[FinishedRun]:
    """Load runs for one table; BadInput if one is not finished, of another kind, or given twice."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]  # noqa: PTH100 - `resolve` would rename links
    runs: list[FinishedRun] = []
    for folder, path in zip(folders, paths, strict=True):
        if path.resolve() in {run.folder.resolve() for run in runs}:
            raise BadInput("RUN", folder, "each run once; this one is given twice")
        others = [other.parts for other in paths if other != path]
        depth = next(end for end in itertools.count(1) if all(other[-end:] != path.parts[-end:] for other in others))
        runs.append(load_run(folder, path, "/".join(path.parts[-depth:]), *runs[:1]))
        with reading(folder, "RUN"):
            text(compare([runs[0], runs[-1]]))  # whatever is told of a run is there
    return runs
