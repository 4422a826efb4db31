"""The help of a command line: in groups, the common flags first, with the options of what is chosen."""

import argparse
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from harness.cli.classes import Classes
from harness.cli.signatures import Missing, Signature, Texts

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


def text(parser: "Parser", flags: Flags, nested: Mapping[str, Classes]) -> str:
    """Return the help: `flags` are all below the parser's keys, `nested` is what options of the Trainer choose from."""
    usage = f"{parser.prog} [--FLAG VALUE ...] [--config FILE] [--print_config] [--help]"
    shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=COLUMN, width=WIDTH)
    page = argparse.ArgumentParser(usage=usage, description=parser.description, formatter_class=shape, add_help=False)
    options = parser.options
    plain = {name: (options.defaults[name], about) for name, about in options.help.items()}
    acting = {flag: entry for flag, entry in {**plain, **flags}.items() if flag not in parser.idle}
    common = {flag: acting.pop(flag) for flag in COMMON if flag in acting}
    groups = [("common flags", {**BARE, **common}), *_groups(parser, acting, nested)]
    for title, members in groups:
        group = page.add_argument_group(textwrap.fill(title, WIDTH))
        for flag, (value, about) in members.items():
            group.add_argument(f"--{flag}", metavar=_as_text(value), help=_first_sentence(about).replace("%", "%%"))
    return page.format_help()


def _groups(parser: "Parser", flags: Flags, nested: Mapping[str, Classes]) -> Iterator[tuple[str, Flags]]:
    """Yield titles, and the flags below them."""
    yield f"other flags of {parser.prog}", {name: flags[name] for name in parser.options.hints if name in flags}
    for key, entry in parser.entries.items():
        below = _below(key, flags)
        if isinstance(entry, Texts):
            if below:  # an option above names the key
                yield f"{key}: {entry.about}", below
        elif not isinstance(entry, Signature):
            yield _title(f"{key}: any name with one of " if entry.named else f"{key}: ", entry.classes), below
        else:
            choosing = {f"{key}.{name}": _below(f"{key}.{name}", below) for name in nested} if key == "trainer" else {}
            chosen = {flag: inner for flag, inner in choosing.items() if inner and flags[flag][0] is not None}
            inside = {flag for inner in chosen.values() for flag in inner}
            plain = {flag: text for flag, text in below.items() if flag not in inside}
            yield f"{key}: options of {'lightning.pytorch.Trainer' if key == 'trainer' else entry.path}", plain
            for flag, inner in chosen.items():
                yield _title(f"{flag}: ", nested[flag.rpartition(".")[2]]), inner


def _below(key: str, flags: Flags) -> Flags:
    return {flag: text for flag, text in flags.items() if flag == key or flag.startswith(f"{key}.")}


def _title(start: str, classes: Classes) -> str:
    return f"{start}{', '.join(classes.by_name)}, or the import path of a class"


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
