"""Classes by import path; what can't be imported is said in one line."""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

from apprentice.errors import BadInput
from harness.config.signatures import near


def imported(path: str, key: str, bases: tuple[type, ...] = (object,)) -> type:
    """The class at an import path, looked for in the working directory too.

    Raises:
        BadInput: naming what is missing, module or class, and what is near.
    """
    module_name, _, name = path.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise BadInput(key, path, f"an import path; importing {module_name} failed: {error}") from error
        parent, _, missing = str(error.name).rpartition(".")
        places = getattr(importlib.import_module(parent), "__path__", []) if parent else None
        siblings = [found.name for found in pkgutil.iter_modules(places)]
        raise BadInput(
            key, path, f"an import path; there is no module {error.name}{near(missing, siblings)}"
        ) from error
    except Exception as error:  # whatever a user's module does
        fault = f"{type(error).__name__}: {error}"
        raise BadInput(key, path, f"an import path; importing {module_name} failed: {fault}") from error
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        classes = [
            other for other, value in vars(module).items() if inspect.isclass(value) and issubclass(value, bases)
        ]
        fault = f"is no class of {module_name}" if found is None else "is no class"
        raise BadInput(key, path, f"the import path of a class; {name} {fault}{near(name, classes)}")
    if not issubclass(found, bases):
        raise BadInput(key, path, f"a class derived from {' or '.join(base.__name__ for base in bases)}")
    return found
