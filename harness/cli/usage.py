"""The help of a command line: short, in groups, with the options of what is chosen."""

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
TRAINER = "described at https://lightning.ai/docs/pytorch/stable/common/trainer.html"
BARE = {
    "config": ("FILE", "settings from YAML; flags override them, wherever they stand"),
    "print_config": ("", "print all settings as YAML, for --config"),
    "help": ("", "print this; with a class, as in --data MNIST --help, its options"),
}
Flags = Mapping[str, tuple[Any, str]]  # values and descriptions


def text(parser: "Parser", flags: Flags, nested: Mapping[str, Classes]) -> str:
    """The whole help: `flags` are all below the parser's keys, `nested` is what options of the Trainer choose from."""
    usage = f"{parser.prog} [--FLAG VALUE ...] [--config FILE] [--print_config] [--help]"
    shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=COLUMN, width=WIDTH)
    page = argparse.ArgumentParser(usage=usage, description=parser.description, formatter_class=shape, add_help=False)
    for title, description, shown in _groups(parser, flags, nested):
        group = page.add_argument_group(title and textwrap.fill(title, WIDTH), description)
        for flag, (value, about) in shown.items():
            first = re.split(r"(?<=\w{3})\. ", re.sub(r" \(default: [^)]*\)", "", " ".join(about.split())))[0]
            group.add_argument(f"--{flag}", metavar=_shown(value), help=first.rstrip(".").replace("%", "%%"))
    return page.format_help()


def _groups(parser: "Parser", flags: Flags, nested: Mapping[str, Classes]) -> Iterator[tuple[Any, str | None, Flags]]:
    options = parser.options
    yield None, None, {**BARE, **{name: (options.defaults[name], about) for name, about in options.help.items()}}
    for key, entry in parser.entries.items():
        below = {flag: shown for flag, shown in flags.items() if flag == key or flag.startswith(f"{key}.")}
        if isinstance(entry, Texts):
            if below:  # an option above names the key
                yield f"{key}: {entry.about}", None, below
        elif not isinstance(entry, Signature):
            yield _choice(f"{key}: any name with one of " if entry.named else f"{key}: ", entry.classes), None, below
        elif key != "trainer":
            yield f"{key}: options of {entry.path}", None, below
        else:
            inner = tuple(f"trainer.{name}" for name in nested if flags[f"trainer.{name}"][0] is not None)
            plain = [f"--{flag} {_shown(value)}" for flag, (value, _) in below.items() if not flag.startswith(inner)]
            lines = textwrap.wrap("  ".join(plain), WIDTH - 2, break_on_hyphens=False)
            yield "trainer: options of lightning.pytorch.Trainer", "\n".join([TRAINER, *lines]), {}
            for flag in inner:
                chosen = {name: shown for name, shown in below.items() if name.startswith(flag)}
                yield _choice(f"{flag}: ", nested[flag.removeprefix("trainer.")]), None, chosen


def _choice(start: str, classes: Classes) -> str:
    return f"{start}{', '.join(classes.known)}, or the import path of a class"


def _shown(value: Any) -> str:
    """A value as it may be given."""
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        value = list(value) if isinstance(value, tuple) else value
        value = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
        return value.replace(", ", ",")
    return "..." if value is Missing else str(value)
