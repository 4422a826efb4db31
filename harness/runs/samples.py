"""data.json: the fingerprint of a run's samples; a run resumes and grows with the same samples only."""

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


def describe_samples(data: InMemoryData) -> dict[str, Any]:
    """Return the content of data.json."""
    return {"name": data.name, "samples": data.sizes, "fingerprint": data.fingerprint()}


def check_samples(out: Path, now: Mapping[str, Any], advice: str = "take another --out") -> None:
    """Raise BadInput, with this advice, if the run in a folder began with other samples than those of `now`."""
    path = out / FILE
    if not path.exists():
        return
    try:
        before = json.loads(read_text(path))
        changed, touched = (find(before["fingerprint"], now["fingerprint"]) for find in (changed_parts, touched_parts))
        counts = {part: (before["samples"].get(part), now["samples"].get(part)) for part in changed}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInput("out", path, f"the record of the run's data ({type(error).__name__}: {error})") from error
    if changed:
        parts = ", ".join(f"{part} ({_counts(*pair)})" for part, pair in counts.items())
        expected = f"the samples with which the run in {out} began; others are in {parts}: {advice}"
        raise BadInput("data", now["name"], expected)
    if touched:
        same = f"names and sizes are the same, and the content of {SAMPLED} files of each"
        notice(f"{now['name']}: files of {', '.join(touched)} have other times than when the run began; {same}")


def _counts(before: Any, now: Any) -> str:
    return f"{before} then, {now} now" if before != now else f"{now} then and now"
