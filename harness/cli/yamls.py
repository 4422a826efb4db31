"""YAML of a bounded depth and size; what would end the process, or fill the memory, is refused at once."""

from dataclasses import dataclass
from typing import Any

import yaml
from jsonargparse import get_loader

from apprentice.errors import BadInput

DEEPEST = 50  # levels; the loader in C ends the process at some ten thousand
MOST = 100_000  # values, an alias counted as what it stands for


class UnboundedError(yaml.MarkedYAMLError):
    """YAML that is nested too deeply, or has too many values."""


class RepeatedKeyError(yaml.MarkedYAMLError):
    """A mapping with two values for one key, of which YAML's loaders take the last."""


@dataclass
class _Collection:
    """A list or mapping that is not yet closed."""

    anchor: str | None
    keys: set[str] | None = None  # of a mapping
    is_key_next: bool = True
    size: int = 1  # values so far, itself one of them

    def add(self, event: yaml.Event, size: int) -> str | None:
        """Count a value of this size; return a mapping's key that is there already."""
        self.size += size
        if self.keys is None:
            return None
        key = event.value if self.is_key_next and isinstance(event, yaml.ScalarEvent) else None
        self.is_key_next = not self.is_key_next
        if key is None or key not in self.keys:
            self.keys.update([] if key is None else [key])
            return None
        return str(key)


def load(text: str) -> Any:
    """Parse YAML, numbers as jsonargparse reads them.

    Raises:
        yaml.YAMLError: it is not YAML, or unbounded, or a mapping has a key twice.
    """
    check(text)
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as ValueError: PyYAML converts `!!int x` with Python's int
        raise yaml.YAMLError(f"a value can't be read: {error}") from error


def check(text: str) -> None:
    """Raise UnboundedError or RepeatedKeyError for YAML that `load` refuses by these; YAMLError if it is not YAML."""
    sizes: dict[str | None, int] = {}  # by anchor
    around: list[_Collection] = []
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        anchor, size = getattr(event, "anchor", None), 1
        mark: Any = event.start_mark  # libyaml's, with the attributes of PyYAML's
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(_Collection(anchor, set() if isinstance(event, yaml.MappingStartEvent) else None))
            if len(around) > DEEPEST:
                raise UnboundedError(problem=f"more than {DEEPEST} levels, one inside the other", problem_mark=mark)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = around.pop()
            anchor, size = closed.anchor, closed.size
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == outer.anchor for outer in around):
                problem = f"the alias *{anchor} inside of what it stands for"
                raise UnboundedError(problem=problem, problem_mark=mark)
            size = sizes.get(anchor, 1)
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None:
            sizes[anchor] = size
        if around:
            repeated = around[-1].add(event, size)
            if repeated is not None:
                raise RepeatedKeyError(problem=f"{repeated} is there twice", problem_mark=mark)
        if size > MOST:
            problem = f"more than {MOST} values, aliases counted as what they stand for"
            raise UnboundedError(problem=problem, problem_mark=mark)


def check_value(text: str, flag: str) -> None:
    """Raise BadInput for a flag's text that is unbounded as YAML, or has a key twice; pass what is not YAML."""
    try:
        check(text)
    except UnboundedError as error:
        raise BadInput(flag, text, f"a value of a bounded size, not {error.problem}") from error
    except RepeatedKeyError as error:
        raise BadInput(flag, text, f"each key once; {error.problem}") from error
    except yaml.YAMLError:
        pass  # some types take such text


def read_value(value: Any, flag: str) -> Any:
    """Parse a flag's value as YAML if it is written as a list, a mapping or null."""
    if not isinstance(value, str) or not (value.strip().startswith(("[", "{")) or value.strip() == "null"):
        return value
    check_value(value, flag)
    try:
        return load(value)
    except yaml.YAMLError as error:
        raise BadInput(flag, value, "YAML, as [First, Second] or {class_path: First}") from error
