"""Where a net's folder lies in its run, and who taught it."""

from pathlib import Path
from typing import NamedTuple

from harness.runs.nets import AVERAGE, read_facts


class NetPath(NamedTuple):
    """Where a net's folder lies: RUN/seed<k>/<name>, or of a moving average of its weights RUN/seed<k>/<name>/ema."""

    run: Path
    seed: str
    name: str
    is_average: bool


def net_path(folder: str | Path) -> NetPath:
    """Return of which run, seed and net a folder is."""
    path = Path(folder).resolve()
    is_average = path.name == AVERAGE and (path.parent / "net.yaml").is_file()
    net = path.parent if is_average else path
    return NetPath(net.parent.parent, net.parent.name, net.name, is_average)


def teachers_beside(folder: str | Path) -> dict[Path, float]:
    """Return the folders of the teachers of a run's student, RUN/seed<k>/teacher by default, and their weights."""
    facts = read_facts(folder)
    taught_by = facts.taught_by if facts else {}
    path = net_path(folder)
    beside = path.run / path.seed
    return {beside / name: weight for name, weight in (taught_by or {"teacher": 1.0}).items()}
