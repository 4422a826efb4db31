"""What a package offers under its own name, imported when it is used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_when_used(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose classes and functions are, by name, in these modules of it."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
