"""Modules of the user's own, in the working directory."""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def put_working_directory_first() -> None:
    """Let modules of the working directory come before others of the same name that are not loaded yet."""
    folder = str(Path.cwd())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a file may be new


def import_module(name: str) -> ModuleType:
    """Import a module, from the working directory if it is there."""
    put_working_directory_first()
    return importlib.import_module(name)


def hidden_file(name: str) -> str:
    """End a message with this module's file in the working directory, if another module has its name."""
    top = name.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    files = (path for path in (Path(top, "__init__.py"), Path(f"{top}.py")) if path.is_file())
    file = next(files, None)
    is_hidden = file is not None and loaded is not None and not Path(loaded).samefile(file)
    return f"; {file} needs another name: {loaded} has this one" if is_hidden else ""
