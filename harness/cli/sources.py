"""Settings by flag, in layers: the defaults first, then files, then flags, of which the last count; YAML of both."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml
from jsonargparse import get_loader

from apprentice.errors import BadInput, shorten
from harness.cli.resuming import NOTHING

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
BARE = ("help", "print_config")  # flags without a value
OF_LAUNCHERS = ("local-rank", "local_rank")  # from torch.distributed.launch; the environment has it too


class FlagValue(NamedTuple):
    """A value, and where it is from unless that is the command line."""

    value: Any
    source: str = ""
    survives_class_change: bool = False  # an option that counts where another class is chosen, too


WITHOUT_VALUE = FlagValue([])  # of a flag that no value follows
Layer: TypeAlias = Mapping[str, FlagValue]  # by flag; what chooses a class stands at the key above its options


def read(argv: Sequence[str]) -> tuple[Sequence[Layer], dict[str, list[str]]]:
    """Read layers of the files in their order, then of the flags, whose values stay text or lists; and bare flags.

    What follows `--help` names what it shall list.
    """
    pairs: list[tuple[str, list[str]]] = []
    for token in ("--help" if token == "-h" else token for token in argv):
        if token.startswith("--"):
            flag, equals, value = token[2:].partition("=")
            pairs.append((flag, [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(token)
        else:
            raise BadInput("", token, "a flag first, such as --data; --help lists them")
    for flag, values in pairs:
        if wrong := [value for value in values if value.encode(errors="replace").decode() != value]:
            raise BadInput(flag, os.fsencode(wrong[0]), "text in UTF-8, as the run's files are")
        if (flag == "print_config" and values) or (flag == "config" and not values):
            raise BadInput(flag, " ".join(values) or NOTHING, "no value" if values else "a value")
    flags = {
        flag.replace(".init_args", "").removesuffix(".class_path"): FlagValue(values[0] if len(values) == 1 else values)
        for flag, values in pairs
        if flag not in {*BARE, *OF_LAUNCHERS, "config"}
    }
    files = [expand_home(path, "config") for flag, values in pairs if flag == "config" for path in values]
    layers = [
        {flag: setting._replace(value=expand_home(setting.value, flag)) for flag, setting in settings.items()}
        for settings in (*(layer(load(path), path) for path in files), flags)
    ]
    return layers, {flag: values for flag, values in pairs if flag in BARE}


def expand_home(value: Any, flag: str = "") -> Any:
    """Expand `~/` at the start of paths; a shell leaves `--out=~/x` and `[~/x]` alone. BadInput for a text with NUL."""
    if isinstance(value, list):
        return [expand_home(entry, flag) for entry in value]
    if isinstance(value, dict):
        return {name: expand_home(entry, flag) for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise BadInput(flag, value.replace("\0", "\\0"), "text without the character NUL")
    return re.sub(r"(?<=[\[, ])~(?=/)" if value.startswith("[") else r"^~(?=/|$)", lambda _: str(Path.home()), value)


def load(path: str | Path, flag: str = "config") -> dict[str, Any]:
    """Return the mapping in a YAML file; BadInput names the file, and the line that is not YAML."""
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(flag, path, f"a YAML file that can be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(flag, path, f"YAML; {fault(error)}") from error
    if not isinstance(values, dict | None):
        raise BadInput(flag, path, "a YAML mapping, such as data: {class_path: MNIST}")
    return {str(name): value for name, value in (values or {}).items()}


def layer(values: Any, source: str = "", key: str = "") -> dict[str, FlagValue]:
    """Return nested settings as a layer; lists stay whole."""
    settings: dict[str, FlagValue] = {}
    for flag, value in flat(values, key, lists=False):
        place = f" (in {source})" if source else ""
        if flag.endswith(".init_args"):
            raise BadInput(flag, value, f"a mapping of options{place}")
        if flag in settings:
            raise BadInput(flag, value, f"one value; {shorten(str(settings[flag].value))} is there, too{place}")
        settings[flag] = FlagValue(value, source)
    return settings


def recipe(flags: Mapping[str, Any], source: str) -> Layer:
    """Return a layer whose options are of any class where it does not choose the class."""
    settings = layer(flags, source)
    return {
        flag: new._replace(survives_class_change=flag.rpartition(".")[0] not in settings)
        for flag, new in settings.items()
    }


def flat(value: Any, key: str = "", lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield nested settings as flags and values; with `lists`, also the entries of lists that hold mappings.

    A name with dots is one for each level: `trainer.max_epochs: 1` is `trainer: {max_epochs: 1}`.
    """
    if isinstance(value, dict):
        for dotted, below in value.items():
            name, _, rest = str(dotted).partition(".")
            inner = {rest: below} if rest else below
            inside = name == "class_path" or (name == "init_args" and isinstance(inner, dict | None))
            if inner is not None or name != "init_args":
                yield from flat(inner, key if inside else f"{key}.{name}".lstrip("."), lists)
    elif lists and isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for i, entry in enumerate(value):
            yield from flat(entry, f"{key}.{i}")
    else:
        yield key, value


def below(flag: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands below a flag, by the rest of the flags."""
    start = f"{flag}."
    return {other.removeprefix(start): setting for other, setting in settings.items() if other.startswith(start)}


def merge(layers: Sequence[Layer], is_same: Callable[[str, Any, Any, Layer], bool]) -> dict[str, FlagValue]:
    """Merge layers, of which the last counts. Another class drops the options of the one before.

    `is_same` compares classes: flag, new name, old name, the options of the old one.
    """
    merged, lasting = dict[str, FlagValue](), dict[str, FlagValue]()
    for settings in layers:
        for flag, setting in settings.items():
            options = below(flag, merged)
            if flag in merged and options and not is_same(flag, setting.value, merged[flag].value, options):
                dropped = {f"{flag}.{name}" for name in options}
                merged = {other: kept for other, kept in merged.items() if other not in dropped}
                merged |= {other: kept for other, kept in lasting.items() if other in dropped}
        merged |= settings
        lasting |= {flag: setting for flag, setting in settings.items() if setting.survives_class_change}
    return merged


@contextmanager
def as_written(settings: Layer) -> Iterator[None]:
    """Let errors show a value as it was written, and the file in which it was."""
    try:
        yield
    except BadInput as error:
        value, flag = error.value, error.argument
        while flag and flag not in settings:
            flag = flag.rpartition(".")[0]
        source = settings[flag].source if flag else ""
        if source.startswith("--") and not all(setting.source for setting in below(flag, settings).values()):
            source = ""  # of a recipe's class some options are the user's
        if flag == error.argument and flag:
            value = settings[flag].value
            value = " ".join(map(str, value)) or NOTHING if isinstance(value, list) and not source else value
        place = f" (in {source})" if source else ""
        raise BadInput(error.argument, value, f"{error.expected}{place}") from error


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        yaml.YAMLError: it is not YAML, or has a key twice, of which loaders take the last.
    """
    try:
        _check_keys(yaml.compose(text, LOADER))
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as ValueError: PyYAML converts `!!int x` with Python's int
        raise yaml.YAMLError(f"a value can't be read: {error}") from error


def _check_keys(node: yaml.Node | None) -> None:
    keys = set[Any]()
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = part if isinstance(node, yaml.MappingNode) else (None, part)
        if key is not None and key.value in keys:
            mark: Any = key.start_mark  # libyaml's, with the attributes of PyYAML's
            raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=mark)
        keys |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        _check_keys(value)


def fault(error: Exception) -> str:
    """Return what is wrong with a text, and in which line if YAML says so."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def read_value(value: Any, flag: str) -> Any:
    """Parse a flag's value as YAML if it is written as a list, a mapping or null."""
    if not isinstance(value, str) or not (value.strip().startswith(("[", "{")) or value.strip() == "null"):
        return value
    try:
        return parse_yaml(value)
    except yaml.YAMLError as error:
        raise BadInput(flag, value, f"YAML, as [First, Second] or {{class_path: First}}; {fault(error)}") from error
