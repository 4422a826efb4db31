"""YAML of a bounded depth and size; what would end the process, or fill the memory, is refused at once."""

from typing import Any

import yaml
from jsonargparse import get_loader

from apprentice.errors import BadInput

DEEPEST = 50  # levels; the loader in C ends the process at some ten thousand
MOST = 100_000  # values, an alias counted as what it stands for
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class RefusedError(yaml.MarkedYAMLError):
    """YAML that is nested too deeply, has too many values, or has a key twice, of which loaders take the last."""

    def __init__(self, problem: str, node: yaml.Node | yaml.Event) -> None:
        mark: Any = node.start_mark  # libyaml's, with the attributes of PyYAML's
        super().__init__(problem=problem, problem_mark=mark)


def load(text: str) -> Any:
    """Parse YAML, numbers as jsonargparse reads them.

    Raises:
        yaml.YAMLError: it is not YAML, or refused.
    """
    check(text)
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as ValueError: PyYAML converts `!!int x` with Python's int
        raise yaml.YAMLError(f"a value can't be read: {error}") from error


def check(text: str) -> None:
    """Raise RefusedError for YAML that `load` refuses; another YAMLError if it is not YAML."""
    depth = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RefusedError(f"more than {DEEPEST} levels, one inside the other", event)
    if (node := yaml.compose(text, LOADER)) is not None:
        _count(node, {}, ())


def _count(node: yaml.Node, counts: dict[yaml.Node, int], around: tuple[yaml.Node, ...]) -> int:
    """Return the number of values of a node; an alias is the node for which it stands."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node in around:
        raise RefusedError("a list or mapping inside of itself", node)
    if node not in counts:
        inside = node.value
        if isinstance(node, yaml.MappingNode):
            keys = set[str]()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in keys:
                    raise RefusedError(f"{key.value} is there twice", key)
                keys.add(key.value)
            inside = [part for pair in node.value for part in pair]
        counts[node] = 1 + sum(_count(part, counts, (*around, node)) for part in inside)
        if counts[node] > MOST:
            raise RefusedError(f"more than {MOST} values, aliases counted as what they stand for", node)
    return counts[node]


def check_value(text: str, flag: str) -> None:
    """Raise BadInput for a flag's text that `load` refuses; pass what is not YAML, which some types take."""
    try:
        check(text)
    except RefusedError as error:
        raise BadInput(flag, text, f"YAML of a bounded size with each key once; {error.problem}") from error
    except yaml.YAMLError:
        pass


def read_value(value: Any, flag: str) -> Any:
    """Parse a flag's value as YAML if it is written as a list, a mapping or null."""
    if not isinstance(value, str) or not (value.strip().startswith(("[", "{")) or value.strip() == "null"):
        return value
    check_value(value, flag)
    try:
        return load(value)
    except yaml.YAMLError as error:
        raise BadInput(flag, value, "YAML, as [First, Second] or {class_path: First}") from error
