"""Fonts for names in scripts that Matplotlib's own font lacks, such as Chinese ones."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

OWN = "DejaVu Sans"  # Matplotlib's
BOXES = "Last Resort"  # how a font is called that draws a box for each character


class Labels(NamedTuple):
    """Names of classes as a figure can show them."""

    names: list[str]
    fonts: list[str]  # to be tried in turn for each character
    note: str  # what is said of them; "" for nothing


def drawable(names: Sequence[str]) -> Labels:
    """Return names with fonts that have all of their characters, or numbers where none is installed."""
    from matplotlib.font_manager import findfont

    missing = frozenset("".join(names)) - _characters(findfont(OWN)) - {"\n"}
    font = _font_with(missing) if missing else OWN
    if font is None:
        note = "classes by number: no font on this machine has their names"
        return Labels([str(number) for number in range(len(names))], [OWN], note)
    return Labels([*names], [OWN, font] if font != OWN else [OWN], "")


@cache
def _characters(path: str) -> frozenset[str]:
    from matplotlib.font_manager import get_font

    return frozenset(map(chr, get_font(path).get_charmap()))


@cache
def _font_with(characters: frozenset[str]) -> str | None:
    """Name an installed font that has all of these characters; None if there is none."""
    from matplotlib.font_manager import fontManager

    fonts = sorted((entry.name, entry.fname) for entry in fontManager.ttflist if not entry.name.startswith(BOXES))
    return next((name for name, path in fonts if characters <= _characters(path)), None)
