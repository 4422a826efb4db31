"""The help of a command line: the common flags on a screen, or those of some keys, or all of them."""

import argparse
import re
import textwrap
import typing
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import yaml

from apprentice.errors import BadInput
from harness.cli.declarations import Declarations
from harness.cli.messages import near
from harness.cli.signatures import Missing
from harness.start import called_as

WIDTH, COLUMN = 118, 36
SCREEN, SCREEN_COLUMN = 80, 28  # of the common flags, of which each has two lines at most
ALL = "all"
OF_A_CALL = {  # flags that a file can't hold, with their values and descriptions
    "config": ("FILE", "settings from YAML; flags override them, wherever they stand"),
    "print_config": ("", "print all settings as YAML, for --config"),
    "help": ("", "print this; --help all lists all flags"),
}
USUAL = ("trainer.devices", "trainer.max_epochs", "trainer.max_steps", "trainer.precision")
PLACES = {bool: "true", int: "N", float: "NUMBER", str: "TEXT"}  # in place of no value, by type
Flags = Mapping[str, tuple[Any, str]]  # values and descriptions


def text(parser: Declarations, flags: Flags, topics: Iterable[str] = (), given: Iterable[str] = ()) -> str:
    """Return the help of the keys, such as `data`, or `all` in `topics`; BadInput for a key that is not there.

    Without topics it is of the classes that are chosen by flags that were `given`.
    """
    acting = {flag: entry for flag, entry in flags.items() if flag not in parser.idle}
    titles = {"": f"flags of {parser.name}", **_titles(parser, flags)}
    groups: dict[str, dict[str, tuple[Any, str]]] = {key: {} for key in titles}
    groups[""] |= OF_A_CALL
    for flag, entry in sorted(acting.items(), key=lambda entry: entry[0] in parser.brought_by):  # these last
        groups[parser.brought_by.get(flag) or _owner(flag, titles)][flag] = entry
    listed = {*topics} or {_owner(flag, titles) for flag in given} - {""}
    if unknown := sorted(listed - titles.keys() - {ALL}):
        expected = f"{ALL}, or of {', '.join(filter(None, titles))}{near(unknown[0], titles)}"
        raise BadInput("help", unknown[0], expected)
    if not listed:
        return _page(parser, {"common flags, with their defaults": _common(parser, acting)}, SCREEN, SCREEN_COLUMN)
    keys = titles if ALL in listed else [key for key in titles if key in listed or key.split(".")[0] in listed]
    return _page(parser, {titles[key]: _described(groups[key]) for key in keys}, WIDTH, COLUMN)


def _page(parser: Declarations, groups: Mapping[str, Mapping[str, tuple[str, str]]], width: int, column: int) -> str:
    """Set titles and their flags, each with its value and description."""
    usage = f"{called_as(parser.prog)} [--FLAG VALUE ...] [--help [all]]"
    shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=column, width=width)
    description = textwrap.fill(parser.description, width)
    page = argparse.ArgumentParser(usage=usage, description=description, formatter_class=shape, add_help=False)
    for title, members in groups.items():
        group = page.add_argument_group(textwrap.fill(title, width))
        for flag, (value, about) in members.items():
            group.add_argument(f"--{flag}", metavar=value, help=about.replace("%", "%%"))
    return page.format_help()


def _described(members: Flags) -> dict[str, tuple[str, str]]:
    return {flag: (_as_text(value), _first_sentence(about)) for flag, (value, about) in members.items()}


def _common(parser: Declarations, acting: Flags) -> dict[str, tuple[str, str]]:
    """Return what the script's options declare as common or, where they declare nothing, all its own flags."""
    options, rows = parser.options, dict[str, tuple[str, str]]()
    for flag in options.target.common or [*options.hints, *parser.entries, *USUAL]:
        classes, entry = parser.classes.get(flag), parser.entries.get(flag)
        value, about = acting.get(flag, (None, ""))
        if classes is not None:
            named = entry is not None and entry.named
            about = f"{entry.about if entry else ''}: {', '.join(classes.by_name)}".removeprefix(": ")
            about = textwrap.shorten(about, SCREEN - SCREEN_COLUMN - 3, placeholder=" ...")
            if named or flag in acting:
                rows[f"{flag}.NAME" if named else flag] = "CLASS" if value is None else _as_text(value), about
        elif flag in acting:
            lines = textwrap.wrap(_first_sentence(about), SCREEN - SCREEN_COLUMN - 3, max_lines=2, placeholder=" ...")
            default = _placeholder(options.hints.get(flag)) if value is None else _as_text(value)
            rows[flag] = default, " ".join(lines)
    key = next(iter(parser.classes), None)
    more = f"; --help {key} or --{key} CLASS --help: those of the {key} or class" if key in parser.entries else ""
    more += "".join(f"; {group.kind} add some" for group in parser.groups)
    return {**rows, **OF_A_CALL, "help": ("", OF_A_CALL["help"][1] + more)}


def _placeholder(hint: Any) -> str:
    """Return what stands for a value where there is none."""
    kinds = [kind for kind in (typing.get_args(hint) or [hint]) if kind is not type(None)]
    return PLACES.get(kinds[0], "...") if len(kinds) == 1 else "..."


def _owner(flag: str, keys: Collection[str]) -> str:
    """Return the longest of the keys below which a flag is; the empty one holds plain flags."""
    return max((key for key in keys if f"{flag}.".startswith(f"{key}.") or not key), key=len)


def _titles(parser: Declarations, flags: Flags) -> dict[str, str]:
    """Return what the help says of each key, and of options of the Trainer that choose classes."""
    titles = {}
    for key, entry in parser.entries.items():
        if entry.options is not None:
            titles[key] = f"{key}: options of {entry.options.path.replace('.trainer.trainer.', '.')}"
        elif key not in parser.classes:
            titles[key] = f"{key}: {entry.about}"
        for flag, classes in parser.classes.items():
            if flag == key and entry.defaults_from:
                titles[flag] = f"{flag}: as --{entry.defaults_from}, unless it is set"
            elif flag == key or (flag.startswith(f"{key}.") and flags[flag][0] is not None):
                any_name = "any name with one of " if entry.named else ""
                titles[flag] = f"{flag}: {any_name}{', '.join(classes.by_name)}, or the import path of a class"
    return titles


def _first_sentence(about: str) -> str:
    """Return the first sentence of a description, without its default and marks of reStructuredText."""
    plain = re.sub(r" \(default: [^)]*\)|``", "", " ".join(about.split()))
    return re.split(r"(?<=\w\w)\. (?=[A-Z])", plain)[0].rstrip(".")


def _as_text(value: Any) -> str:
    """Write a value as a flag takes it."""
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        value = list(value) if isinstance(value, tuple) else value
        value = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
        return value.replace(", ", ",")
    return "..." if value is Missing else str(value)
