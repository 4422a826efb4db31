"""Figures as a digest of what they show: to draw one takes longer than most fits of these tests."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from harness.reports import interactive

DRAW, SECTIONS = Figure.draw, interactive.sections


def sketch(figure: Any, renderer: Any) -> None:
    """Fill the figure with a color that follows from its texts and its images; takes the place of `Figure.draw`."""
    shown = [text.get_text() for text in figure.findobj(Text)]
    shown += [image.get_array().tobytes().hex() for image in figure.findobj(AxesImage)]
    color = [byte / 255 for byte in hashlib.blake2b(repr(shown).encode(), digest_size=3).digest()]
    figure.patch.set_facecolor(color)
    figure.patch.draw(renderer)


@contextmanager
def drawing(draw: Any, sections: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "draw", draw)
        patched.setattr(interactive, "sections", sections)
        yield


def sketched() -> Any:
    """Within it figures are sketched, and `report.html` has no plots."""
    return drawing(sketch, lambda *_: [])


def drawn() -> Any:
    """Within it figures are as users see them."""
    return drawing(DRAW, SECTIONS)
