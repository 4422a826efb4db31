"""data.json: what tells the samples of a run's data from others; a run goes on with the same samples only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from datamodules import InMemoryData
from datamodules.fingerprints import SAMPLED, changed_parts, touched_parts
from harness.runs.files import read_text
from harness.runs.quiet import notice

FILE = "data.json"


def facts(data: InMemoryData) -> dict[str, Any]:
    """What data.json holds."""
    return {"name": data.name, "samples": data.sizes, "fingerprint": data.fingerprint()}


def check(out: Path, now: Mapping[str, Any], advice: str = "take another --out") -> None:
    """Raise BadInput, with this advice, if the run in a folder began with other samples than those of `now`."""
    path = out / FILE
    if not path.exists():
        return
    try:
        before = json.loads(read_text(path))
        parts, others = (find(before["fingerprint"], now["fingerprint"]) for find in (changed_parts, touched_parts))
        counts = {part: (before["samples"].get(part), now["samples"].get(part)) for part in parts}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInput("out", path, f"the record of the run's data ({type(error).__name__}: {error})") from error
    if parts:
        told = ", ".join(f"{part} ({_counts(*pair)})" for part, pair in counts.items())
        expected = f"the samples with which the run in {out} began; others are in {told}: {advice}"
        raise BadInput("data", now["name"], expected)
    if others:
        same = f"names and sizes are the same, and the content of {SAMPLED} files of each"
        notice(f"{now['name']}: files of {', '.join(others)} have other times than when the run began; {same}")


def _counts(before: Any, now: Any) -> str:
    return f"{before} then, {now} now" if before != now else f"{now} then and now"
