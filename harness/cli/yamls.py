"""YAML of files and flags, with numbers as jsonargparse reads them."""

from typing import Any

import yaml
from jsonargparse import get_loader

from apprentice.errors import BadInput

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def load(text: str) -> Any:
    """Parse YAML.

    Raises:
        yaml.YAMLError: it is not YAML, or has a key twice, of which loaders take the last.
    """
    try:
        _check_keys(yaml.compose(text, LOADER))
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as ValueError: PyYAML converts `!!int x` with Python's int
        raise yaml.YAMLError(f"a value can't be read: {error}") from error


def _check_keys(node: yaml.Node | None) -> None:
    keys = set[Any]()
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = part if isinstance(node, yaml.MappingNode) else (None, part)
        if key is not None and key.value in keys:
            mark: Any = key.start_mark  # libyaml's, with the attributes of PyYAML's
            raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=mark)
        keys |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        _check_keys(value)


def fault(error: Exception) -> str:
    """Return what is wrong with a text, and in which line if YAML says so."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def read_value(value: Any, flag: str) -> Any:
    """Parse a flag's value as YAML if it is written as a list, a mapping or null."""
    if not isinstance(value, str) or not (value.strip().startswith(("[", "{")) or value.strip() == "null"):
        return value
    try:
        return load(value)
    except yaml.YAMLError as error:
        raise BadInput(flag, value, f"YAML, as [First, Second] or {{class_path: First}}; {fault(error)}") from error
