"""What a run's nets begin with where files say it, such as a model's folder: a run goes on with the same alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from apprentice.errors import BadInput
from harness.runs.files import read_text, write_json
from harness.runs.records import reading
from lit_modules.nets.identity import Origin

FILE = "nets.json"


def check_origins(out: Path, now: Mapping[str, Origin], values: Mapping[str, object]) -> None:
    """Raise BadInput if a net of the run in a folder began otherwise; `values` are those of the flags that chose it."""
    for key, origin in _read(out).items():
        if key in now and (change := origin.change(now[key])):
            flag = key.partition(" ")[0]
            flag = f"{flag}.name" if f"{flag}.name" in values else flag
            raise BadInput(flag, values.get(flag), f"what the run in {out} began with; {change}: take another `out`")


def write(out: Path, now: Mapping[str, Origin]) -> None:
    """Write the origins into the run's folder, beside those of before; no file if none is known."""
    known = {**now, **_read(out)}
    if told := {key: asdict(origin) for key, origin in known.items() if origin.configuration or origin.content}:
        write_json(out / FILE, told)


def _read(out: Path) -> dict[str, Origin]:
    path = out / FILE
    if not path.exists():
        return {}
    with reading(path, "out", "the record of what the run's nets began with"):
        return {str(key): Origin(**facts) for key, facts in json.loads(read_text(path)).items()}
