"""YAML of a bounded depth and size; what would end the process, or fill the memory, is refused at once."""

from typing import Any

import yaml
from jsonargparse import get_loader

DEEPEST = 50  # levels; the loader in C ends the process at some ten thousand
MOST = 100_000  # values, an alias counted as what it stands for


class UnboundedError(yaml.MarkedYAMLError):
    """YAML that is nested too deeply, or has too many values."""

    def __init__(self, event: yaml.Event, problem: str) -> None:
        mark: Any = event.start_mark  # libyaml's, with the same attributes
        super().__init__(problem=problem, problem_mark=mark)


class RepeatedKeyError(yaml.MarkedYAMLError):
    """A mapping with two values for one key, of which YAML's loaders take the last."""


def load(text: str) -> Any:
    """What a text stands for, numbers as jsonargparse reads them.

    Raises:
        yaml.YAMLError: it is not YAML, or unbounded, or a mapping has a key twice.
    """
    check(text)
    check_keys(text)
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as ValueError: PyYAML converts `!!int x` with Python's int
        raise yaml.YAMLError(f"a value can't be read: {error}") from error


def check_keys(text: str) -> None:
    """Raise RepeatedKeyError for a bounded YAML text in which a mapping has a key twice."""
    nodes, seen = [yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            names = set[str]()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in names:
                    raise RepeatedKeyError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
                names.add(str(key.value))
                nodes.append(value)


def check(text: str) -> None:
    """Raise UnboundedError for YAML that `load` refuses by its size; YAMLError if it is not YAML."""
    sizes: dict[str | None, int] = {}  # by anchor
    around: list[tuple[str | None, int]] = []  # anchor, and size so far, of the collections that are not yet closed
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            around.append((anchor, size))
            if len(around) > DEEPEST:
                raise UnboundedError(event, f"more than {DEEPEST} levels, one inside the other")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = around.pop()
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == outer for outer, _ in around):
                raise UnboundedError(event, f"the alias *{anchor} inside of what it stands for")
            size = sizes.get(str(anchor), 1)
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None:
            sizes[anchor] = size
        if around:
            around[-1] = around[-1][0], around[-1][1] + size
        if size > MOST:
            raise UnboundedError(event, f"more than {MOST} values, aliases counted as what they stand for")
