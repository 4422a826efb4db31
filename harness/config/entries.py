"""What may stand at a key of the command line: a choice, named choices, or the options of a fixed class."""

import re
from dataclasses import dataclass
from typing import Any, Protocol

from apprentice.errors import BadInput
from harness.config.choices import Catalogue, Choice, Chosen, Family, from_yaml, leaf, split
from harness.config.signatures import Options, near


class Entry(Protocol):
    """One key: its value by default, changed by what is given, checked and shown."""

    def start(self, catalogue: Catalogue, key: str) -> Any:
        """The value by default."""

    def change(self, catalogue: Catalogue, old: Any, given: Any, key: str) -> Any:
        """The value after something was given for it."""

    def check(self, catalogue: Catalogue, value: Any, key: str) -> None:
        """Raise BadInput where something is missing."""

    def plain(self, catalogue: Catalogue, value: Any) -> Any:
        """The value as YAML has it."""


@dataclass
class One:
    """`--data MNIST --data.root X`: one class and its options."""

    family: Family
    default: Any
    optional: bool = False

    def start(self, catalogue: Catalogue, key: str) -> Chosen:
        """The default class with its defaults."""
        return catalogue.choose(self.family, None, self.default, key)

    def change(self, catalogue: Catalogue, old: Chosen, given: Any, key: str) -> Chosen:
        """Another class, or other options."""
        chosen = catalogue.choose(self.family, old, given, key)
        if isinstance(chosen, list) or (chosen is None and not self.optional):
            shown = "null" if chosen is None else given
            raise BadInput(key, shown, f"one class: {self.family.expected()}")
        return chosen

    def check(self, catalogue: Catalogue, value: Chosen, key: str) -> None:
        """No option that the class needs is missing."""
        catalogue.check_complete(self.family, value, key)

    def plain(self, catalogue: Catalogue, value: Chosen) -> Any:
        """`class_path` and `init_args`."""
        return catalogue.plain(self.family, value)


@dataclass
class Many:
    """`--variants.t8 Hinton --variants.t8.temperature 8`: classes by names of one's own, merged by name."""

    family: Family
    default: dict[str, Any]
    only: str = "only"

    def start(self, catalogue: Catalogue, key: str) -> dict[str, Chosen]:
        """The default ones."""
        return self.change(catalogue, {}, self.default, key)

    def change(self, catalogue: Catalogue, old: dict[str, Chosen], given: Any, key: str) -> dict[str, Chosen]:
        """Those that are named, changed or added."""
        if isinstance(given, str):
            given = from_yaml(given, key)
        if not isinstance(given, dict):
            raise BadInput(key, given, f"a name and a class, as --{key}.mine {next(iter(self.family.known))}")
        return {**old, **{str(name): self._one(catalogue, old, str(name), value, key) for name, value in given.items()}}

    def _one(self, catalogue: Catalogue, old: dict[str, Chosen], name: str, given: Any, key: str) -> Chosen:
        flag = f"{key}.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == "teacher":
            raise BadInput(*leaf(flag, given), f"a name of letters, digits, _ and - after --{key}, other than teacher")
        if name not in old and isinstance(given, dict) and "class_path" not in given:
            expected = f"one of {', '.join(old)}, or --{flag} CLASS beside it for a new one{near(name, old)}"
            raise BadInput(*leaf(flag, given), expected)
        return One(self.family, None).change(catalogue, old.get(name), given, flag)

    def check(self, catalogue: Catalogue, value: dict[str, Chosen], key: str) -> None:
        """No option that a class needs is missing."""
        for name, chosen in value.items():
            catalogue.check_complete(self.family, chosen, f"{key}.{name}")

    def plain(self, catalogue: Catalogue, value: dict[str, Chosen]) -> dict[str, Any]:
        """The choices by name."""
        return {name: catalogue.plain(self.family, chosen) for name, chosen in value.items()}


@dataclass
class Fixed:
    """`--trainer.max_epochs 10`: the options of one class."""

    class_path: str
    options: Options
    default: dict[str, Any]

    def start(self, catalogue: Catalogue, key: str) -> Choice:
        """The defaults of the class, but those that are ours."""
        return catalogue.set_options(Choice(self.class_path, self.options.defaults), self.options, self.default, key)

    def change(self, catalogue: Catalogue, old: Choice, given: Any, key: str) -> Choice:
        """Other options."""
        own, inner = split(given, key)
        if not isinstance(given, dict) or "class_path" in given:
            raise BadInput(key, own, f"an option, as --{key}.{next(iter(self.options))}")
        return catalogue.set_options(old, self.options, inner, key)

    def check(self, catalogue: Catalogue, value: Choice, key: str) -> None:
        """No option that a class needs is missing."""
        catalogue.check_options(self.options, value, key)

    def plain(self, catalogue: Catalogue, value: Choice) -> dict[str, Any]:
        """The options."""
        return catalogue.plain_options(self.options, value)
