"""The help of a command line: short, in groups, with the options of what is chosen."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from harness.config.classes import Choice, Classes, imported, is_choice
from harness.config.signatures import Missing, Signature, options_of

if TYPE_CHECKING:
    from harness.config.parser import Parser

WIDTH, COLUMN = 110, 36
TRAINER = "described at https://lightning.ai/docs/pytorch/stable/common/trainer.html"


def text(parser: "Parser", settings: Mapping[str, Any], nested: Mapping[str, Classes]) -> str:
    """The whole help, with what is chosen so far; `nested` is what options of the Trainer choose from."""
    lines = [f"usage: {parser.prog} [--FLAG VALUE ...] [--config FILE] [--print_config] [--help]", ""]
    lines += [*_wrapped(parser.description), ""]
    lines += _line("--config FILE", "settings from YAML; flags override them, wherever they stand")
    lines += _line("--print_config", "print all settings as YAML, for --config")
    lines += _line("--help", "print this; with a class, as in --data MNIST --help, its options")
    lines += _options("", parser.options, {**settings, "seeds": parser.options.defaults["seeds"]})
    classes = parser.classes(settings)
    for key, entry in parser.entries.items():
        chosen = settings[key]
        if entry.only is None:
            lines += _choices(classes[key], chosen, key)
        elif key == "trainer":
            lines += _trainer(nested, chosen)
        else:
            options = _options(f"{key}.", entry.only[1], chosen.init_args)
            lines += ["", f"{key}: options of {chosen.class_path}", *options]
    return "\n".join(lines) + "\n"


def _choices(classes: Classes, chosen: Any, key: str) -> Iterator[str]:
    what = "any name with one of " if isinstance(chosen, dict) else ""
    yield from ("", *_wrapped(f"{key}: {what}{', '.join(classes.known)}, or the import path of a class"))
    named = {f"{key}.{name}": choice for name, choice in chosen.items()} if isinstance(chosen, dict) else {key: chosen}
    for flag, choice in named.items():
        yield f"  --{flag} {_shown(choice) if isinstance(choice, list) else classes.label(choice)}"
        if isinstance(choice, Choice):
            options = options_of(imported(choice.class_path, flag), classes.skip)
            yield from _options(f"{flag}.", options, choice.init_args)


def _trainer(nested: Mapping[str, Classes], trainer: Choice) -> Iterator[str]:
    yield from ("", f"trainer: options of {trainer.class_path}, {TRAINER}")
    inner = {f"trainer.{name}": value for name, value in trainer.init_args.items() if name in nested and value}
    flags = {f"trainer.{name}": value for name, value in trainer.init_args.items()}
    yield from _wrapped(
        "  ".join(f"--{flag} {_shown(value)}" for flag, value in flags.items() if flag not in inner), "  "
    )
    for flag, value in inner.items():
        yield from _choices(nested[flag.removeprefix("trainer.")], value, flag)


def _options(prefix: str, options: Signature, values: Mapping[str, Any]) -> Iterator[str]:
    for name, description in options.help.items():
        yield from _line(f"--{prefix}{name} {_shown(values[name])}", " ".join(description.split()))


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
    if isinstance(value, Choice):
        return value.name
    if is_choice(value):
        return f"[{','.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        value = list(value) if isinstance(value, tuple) else value
        value = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
        return value.replace(", ", ",")
    return "..." if value is Missing else str(value)
