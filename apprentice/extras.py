"""Optional dependencies: the extras of pyproject.toml."""

import importlib
import logging
import warnings

from apprentice.errors import BadInput


class Missing(BadInput):
    """A package of an extra is not installed; no argument is at fault."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install --no-build-isolation -e '.[{extra}]'"


def need(extra: str, *packages: str) -> None:
    """Import the packages of an extra; raise Missing, with the command that installs them, if one is absent."""
    log = logging.getLogger("torch.utils._pytree")
    level = log.level
    log.setLevel(logging.ERROR)  # torchao 0.18 registers an enum with an API that torch 2.15 deprecates
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from compiling the packages' source
            for package in packages:
                importlib.import_module(package)
    except ModuleNotFoundError as error:
        expected = f"it installed; the extra [{extra}] brings it: {install_command(extra)}"
        raise Missing("", error.name or packages[0], expected) from None
    finally:
        log.setLevel(level)
