"""`timeline` under the import path that a notebook once showed."""

from pkgutil import resolve_name
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "timeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name("lab.studies.pipeline.report.timeline")
