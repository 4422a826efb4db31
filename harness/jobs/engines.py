"""What `--launcher` chooses from."""

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from harness.cli.classes import Classes
from harness.jobs.base import Launcher
from harness.jobs.local import Local
from harness.jobs.ray import Ray
from harness.jobs.slurm import Slurm

__all__ = ["LAUNCHERS", "Launchers", "Local", "Ray", "Slurm"]


@dataclass(frozen=True)
class Launchers(Classes):
    """Engines of jobs by name, in small letters."""

    bases: tuple[type, ...] = (Launcher,)
    package: ModuleType = sys.modules[__name__]

    @property
    def by_name(self) -> dict[str, type]:
        return {name.lower(): engine for name, engine in super().by_name.items() if inspect.isclass(engine)}

    def find(self, name: Any, key: str) -> Any:
        return super().find(name.lower() if isinstance(name, str) and "." not in name else name, key)

    def is_same(self, name: Any, old: Any, options: Any) -> bool:
        return super().is_same(str(name).lower(), str(old).lower(), options)


LAUNCHERS = Launchers()
