"""Where settings come from: the flags and YAML files, each as nested mappings of what was given."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from apprentice.errors import BadInput

BARE = ("help", "print_config")  # flags without a value
OF_LAUNCHERS = ("local-rank", "local_rank")  # torch.distributed.launch gives it, and the environment says it, too


class Stray(BadInput):
    """A value that belongs to no flag."""

    def __str__(self) -> str:
        return f"{self.value}: expected {self.expected}"


def flags(argv: Sequence[str]) -> dict[str, Any]:
    """The flags as nested mappings: `--data MNIST --data.root X` is `{"data": {"class_path": "MNIST", "root": "X"}}`.

    Values stay text; several for one flag are a list, as are all of `config`; bare flags are true. A node that has both
    a value and options below keeps the value as its `class_path`.

    Raises:
        BadInput: a flag has no value, or one that is not UTF-8, or a value no flag.
    """
    tree: dict[str, Any] = {}
    for key, values in _pairs(argv):
        if key in OF_LAUNCHERS:
            continue
        for value in values:
            if (
                value.encode(errors="replace").decode() != value
            ):  # bytes of an argument that are not UTF-8 are surrogates
                raise BadInput(key, os.fsencode(value), "text in UTF-8, as the run's files are")
        if key in BARE:
            if values:
                raise BadInput(key, " ".join(values), "no value")
            tree[key] = True
        elif not values:
            raise BadInput(key, "(nothing)", "a value")
        elif key == "config":
            tree["config"] = [*tree.get("config", []), *values]
        else:
            put(tree, key, values[0] if len(values) == 1 else values)
    return tree


def _pairs(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    pairs: list[tuple[str, list[str]]] = []
    for token in argv:
        if token == "-h":
            pairs.append(("help", []))
        elif token.startswith("--"):
            key, equals, value = token[2:].partition("=")
            pairs.append((key, [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(token)
        else:
            raise Stray("", token, "a flag first, as --data; --help lists them")
    return pairs


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a node that has both a value and options below keeps the value as its `class_path`."""
    *branches, last = [part for part in key.split(".") if part != "init_args"]
    for part in branches:
        if not isinstance(tree.get(part), dict):
            tree[part] = {"class_path": tree[part]} if part in tree else {}
        tree = tree[part]
    if isinstance(tree.get(last), dict):
        tree[last]["class_path"] = value
    else:
        tree[last] = value


def load(path: str | Path, flag: str = "config") -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        BadInput: naming the file, and the line that is no YAML.
    """
    try:
        values = get_loader("yaml")(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(flag, path, f"a YAML file that can be read ({error.strerror})") from error
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadInput(flag, path, f"YAML; {place}{error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(flag, path, f"YAML; {' '.join(str(error).split())}") from error
    if values is None or (isinstance(values, str) and not values.strip()):
        return {}
    if not isinstance(values, dict):
        raise BadInput(flag, path, "a YAML mapping, as data: {class_path: MNIST}")
    return {str(name): value for name, value in values.items()}
