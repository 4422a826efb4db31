"""The help of a command line: in groups, the common flags first, with the options of what is chosen."""

import argparse
import re
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from harness.cli.signatures import Missing

if TYPE_CHECKING:
    from harness.cli.parser import Parser

WIDTH, COLUMN = 118, 36
BARE = {
    "config": ("FILE", "settings from YAML; flags override them, wherever they stand"),
    "print_config": ("", "print all settings as YAML, for --config"),
    "help": ("", "print this; with a class, as in --data MNIST --help, its options"),
}
COMMON = (
    "seeds", "out", "resume", "overwrite", "exact", "trainer.devices", "trainer.max_epochs", "trainer.max_steps",
    "trainer.precision",
)  # fmt: skip
Flags = Mapping[str, tuple[Any, str]]  # values and descriptions


def text(parser: "Parser", flags: Flags) -> str:
    """Return the help; `flags` are all below the parser's keys."""
    usage = f"{parser.prog} [--FLAG VALUE ...] [--config FILE] [--print_config] [--help]"
    shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=COLUMN, width=WIDTH)
    page = argparse.ArgumentParser(usage=usage, description=parser.description, formatter_class=shape, add_help=False)
    options = parser.options
    plain = {name: (options.defaults[name], about) for name, about in options.help.items()}
    acting = {flag: entry for flag, entry in {**plain, **flags}.items() if flag not in parser.idle}
    common = {flag: acting.pop(flag) for flag in COMMON if flag in acting}
    others = {flag: acting.pop(flag) for flag in plain if flag in acting}
    titles = {"": f"other flags of {parser.prog}", **_titles(parser, flags)}
    groups: dict[str, dict[str, tuple[Any, str]]] = {"": others}
    for flag, entry in acting.items():
        owners = [key for key in titles if f"{flag}.".startswith(f"{key}.")]
        groups.setdefault(owners[-1], {})[flag] = entry
    for title, members in [
        ("common flags", {**BARE, **common}),
        *((titles[key], groups.get(key, {})) for key in titles),
    ]:
        group = page.add_argument_group(textwrap.fill(title, WIDTH))
        for flag, (value, about) in members.items():
            group.add_argument(f"--{flag}", metavar=_as_text(value), help=_first_sentence(about).replace("%", "%%"))
    return page.format_help()


def _titles(parser: "Parser", flags: Flags) -> dict[str, str]:
    """Return what the help says of each key, and of options of the Trainer that choose classes."""
    titles = {}
    for key, entry in parser.entries.items():
        if entry.options is not None:
            titles[key] = f"{key}: options of {entry.options.path.replace('.trainer.trainer.', '.')}"
        elif key not in parser.classes:
            titles[key] = f"{key}: {entry.about}"
        for flag, classes in parser.classes.items():
            if flag == key and entry.like:
                titles[flag] = f"{flag}: as --{entry.like}, unless it is set"
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
