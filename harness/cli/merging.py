"""Settings in layers, the defaults first, then files, then flags: which of them count."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from harness.cli.classes import Classes
from harness.cli.sources import Layer, Setting, layer
from harness.cli.yamls import read_value

ClassesAt: TypeAlias = Callable[[str], Classes | None]  # what a flag chooses from, if it chooses


def merge(layers: Sequence[Layer], classes_at: ClassesAt) -> dict[str, Setting]:
    """Merge layers, of which the last counts. Another class drops the options of the one before."""
    merged: dict[str, Setting] = {}
    for settings in [_expand_mappings(written, classes_at) for written in layers]:
        for flag, (name, _) in settings.items():
            options = below(flag, merged)
            if flag in merged and options and not _is_same_class(name, merged[flag].value, options, classes_at(flag)):
                merged = {other: setting for other, setting in merged.items() if not other.startswith(f"{flag}.")}
        merged |= settings
    return merged


def below(flag: str, settings: Layer) -> Layer:
    """Return the settings below a flag, by the rest of their flags."""
    start = f"{flag}."
    return {other.removeprefix(start): setting for other, setting in settings.items() if other.startswith(start)}


def _expand_mappings(settings: Layer, classes_at: ClassesAt) -> dict[str, Setting]:
    """Replace a choice that is written as a mapping in YAML by the flags for which it stands."""
    inside, others = dict[str, Setting](), dict[str, Setting]()
    for flag, setting in settings.items():
        value = read_value(setting.value, flag) if classes_at(flag) else None
        if isinstance(value, dict):
            inside |= layer(value, setting.source, flag)
        else:
            others[flag] = setting
    return inside | others


def _is_same_class(name: object, old: object, options: Layer, classes: Classes | None) -> bool:
    if classes is None:
        return name == old
    return classes.same(name, old, {option: setting.value for option, setting in options.items()})


def settings_of_any_class(recipes: Sequence[Layer], layers: Sequence[Layer], classes_at: ClassesAt) -> Layer:
    """Return the options in recipes of classes that recipes do not choose, unless a later layer sets them."""
    of_recipes = {flag: setting for recipe in recipes for flag, setting in recipe.items()}
    explicit = merge(layers, classes_at)
    return {
        flag: setting
        for flag, setting in of_recipes.items()
        if setting.source and flag not in explicit and flag.rpartition(".")[0] not in of_recipes
    }
