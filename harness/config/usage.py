"""The help of a command line: short, in groups, with the options of what is chosen."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from harness.config.classes import Classes
from harness.config.signatures import Missing

if TYPE_CHECKING:
    from harness.config.parser import Parser

WIDTH, COLUMN = 118, 36
TRAINER = ", described at https://lightning.ai/docs/pytorch/stable/common/trainer.html"
Flags = Mapping[str, tuple[Any, str]]  # values and descriptions


def text(parser: "Parser", flags: Flags, nested: Mapping[str, Classes]) -> str:
    """The whole help.

    Args:
        parser: what there is.
        flags: all flags below the parser's keys, with what is chosen so far.
        nested: what options of the Trainer choose from.
    """
    lines = [f"usage: {parser.prog} [--FLAG VALUE ...] [--config FILE] [--print_config] [--help]", ""]
    lines += [*_wrapped(parser.description), ""]
    lines += _line("--config FILE", "settings from YAML; flags override them, wherever they stand")
    lines += _line("--print_config", "print all settings as YAML, for --config")
    lines += _line("--help", "print this; with a class, as in --data MNIST --help, its options")
    lines += _options({name: (parser.options.defaults[name], text) for name, text in parser.options.help.items()})
    for key, entry in parser.entries.items():
        own = {flag: shown for flag, shown in flags.items() if flag == key or flag.startswith(f"{key}.")}
        if entry.only is None:
            lines += _choice(key, entry.classes, own, "any name with one of " if entry.named else "")
        elif key == "trainer":
            lines += ["", f"{key}: options of {entry.only[0]}{TRAINER}", *_trainer(own, nested)]
        else:
            lines += ["", f"{key}: options of {entry.only[0]}", *_options(own)]
    return "\n".join(lines) + "\n"


def _trainer(flags: Flags, nested: Mapping[str, Classes]) -> Iterator[str]:
    """The Trainer's options without descriptions, then what is chosen among them."""
    inner = [f"trainer.{name}" for name in nested if flags[f"trainer.{name}"][0] is not None]
    plain = [flag for flag in flags if not flag.startswith(tuple(inner))]
    yield from _wrapped("  ".join(f"--{flag} {_shown(flags[flag][0])}" for flag in plain), "  ")
    for flag in inner:
        below = {each: shown for each, shown in flags.items() if each.startswith(flag)}
        yield from _choice(flag, nested[flag.removeprefix("trainer.")], below)


def _choice(key: str, classes: Classes, flags: Flags, what: str = "") -> Iterator[str]:
    yield from ("", *_wrapped(f"{key}: {what}{', '.join(classes.known)}, or the import path of a class"))
    yield from _options(flags)


def _options(flags: Flags) -> Iterator[str]:
    for flag, (value, description) in flags.items():
        yield from _line(f"--{flag} {_shown(value)}", " ".join(description.split()))


def _line(flag: str, description: str) -> list[str]:
    """A flag and the first sentence about it, beside it or below."""
    sentence = re.split(r"(?<=\w{3})\. ", re.sub(r" \(default: [^)]*\)", "", description))[0].rstrip(".")
    start, lines = f"  {flag}", _wrapped(sentence, " " * COLUMN)
    if lines and len(start) < COLUMN:
        start, lines = f"{start:<{COLUMN}}{lines[0].strip()}", lines[1:]
    return [start, *lines]


def _wrapped(words: str, indent: str = "") -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _shown(value: Any) -> str:
    """A value as it may be given."""
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        value = list(value) if isinstance(value, tuple) else value
        value = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
        return value.replace(", ", ",")
    return "..." if value is Missing else str(value)
