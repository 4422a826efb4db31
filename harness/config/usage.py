"""The help of a command line: short, in groups, with the options of what is chosen."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import yaml

from harness.config.choices import Catalogue, Choice, Chosen, Family
from harness.config.entries import Fixed, Many, One
from harness.config.signatures import Options

if TYPE_CHECKING:
    from harness.config.parser import Parser

WIDTH, COLUMN = 110, 36


def text(parser: "Parser", settings: Mapping[str, Any]) -> str:
    """The whole help; `settings` are what is chosen so far."""
    lines = [f"usage: {parser.prog} [--FLAG VALUE ...] [--config FILE] [--print_config] [--help]", ""]
    lines += _wrapped(parser.description)
    lines += ["", *_line("--config FILE", "settings from YAML; flags override them, wherever they stand")]
    lines += _line("--print_config", "print all settings as YAML, for --config")
    lines += _line("--help", "print this; with a class, as in --data MNIST --help, its options")
    for name in parser.options:
        lines += _line(f"--{name} {_shown(settings[name])}", parser.options.description(name))
    for key, entry in parser.entries.items():
        if isinstance(entry, One):
            lines += ["", *_choice(entry.family, settings[key], key)]
        if isinstance(entry, Many):
            lines += ["", *_variants(entry, settings[key], key)]
        if isinstance(entry, Fixed):
            lines += ["", *_fixed(parser.catalogue, entry.options, settings[key], key)]
    return "\n".join(lines) + "\n"


def _choice(family: Family, chosen: Chosen, key: str) -> Iterator[str]:
    yield from _wrapped(f"{key}: {', '.join(family.known)}, or the import path of a class")
    yield from _line(f"--{key} {_shown(chosen) if isinstance(chosen, list) else family.label(chosen)}", "")
    if isinstance(chosen, Choice):
        options = family.options(chosen, key)
        for name in options:
            yield from _line(f"--{key}.{name} {_shown(chosen.init_args.get(name, '...'))}", options.description(name))


def _variants(entry: Many, chosen: Mapping[str, Choice], key: str) -> Iterator[str]:
    known = ", ".join(entry.family.known)
    yield from _wrapped(f"{key}: any name with one of {known}, or the import path of a class")
    for name, choice in chosen.items():
        yield from _line(f"--{key}.{name} {choice.name}", "")
        for option in entry.family.options(choice, key):
            shown = _shown(choice.init_args.get(option, "..."))
            yield from _line(f"--{key}.{name}.{option} {shown}", entry.family.options(choice, key).description(option))


def _fixed(catalogue: Catalogue, options: Options, chosen: Choice, key: str) -> Iterator[str]:
    values = chosen.init_args
    if chosen.name != "Trainer":
        yield f"{key}: options of {chosen.class_path}"
        for name in options:
            yield from _line(f"--{key}.{name} {_shown(values[name])}", options.description(name))
        return
    yield f"{key}: options of {chosen.class_path}, described at https://lightning.ai/docs/pytorch/stable/common/trainer.html"
    inner = {name: family for name in options if values[name] and (family := catalogue.inner(options, name))}
    plain = (f"--{key}.{name} {_shown(values[name])}" for name in options if name not in inner)
    yield from _wrapped("  ".join(plain), "  ")
    for name, family in inner.items():
        yield from ("", *_choice(family, values[name], f"{key}.{name}"))


def _line(flag: str, description: str) -> list[str]:
    """A flag and the first sentence about it, beside it or below."""
    start, lines = f"  {flag}", _wrapped(re.split(r"(?<=\w{3})\. ", description)[0].rstrip("."), " " * COLUMN)
    if lines and len(start) < COLUMN:
        start, lines = f"{start:<{COLUMN}}{lines[0].strip()}", lines[1:]
    return [start, *lines]


def _wrapped(words: str, indent: str = "") -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _shown(value: Any) -> str:
    if isinstance(value, str | timedelta):
        return str(value)
    if isinstance(value, Choice):
        return value.name
    if isinstance(value, list) and any(isinstance(entry, Choice) for entry in value):
        return f"[{','.join(entry.name for entry in value)}]"
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip().replace(", ", ",")
