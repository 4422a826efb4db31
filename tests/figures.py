"""Figures as a digest of what they show: to draw one takes longer than most fits of these tests."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from harness.reports import charts
from harness.reports.bakeoff import page
from harness.reports.charts import metric_picture
from harness.reports.figures import figure
from harness.runs import tensorboard
from harness.runs.tensorboard import confusion_figure

SIDE = 0.2  # inches


def sketch(figure: Any, renderer: Any) -> None:
    """Fill the figure with a color that follows from its texts and its images; takes the place of `Figure.draw`."""
    shown = [text.get_text() for text in figure.findobj(Text)]
    shown += [image.get_array().tobytes().hex() for image in figure.findobj(AxesImage)]
    color = [byte / 255 for byte in hashlib.blake2b(repr(shown).encode(), digest_size=3).digest()]
    figure.patch.set_facecolor(color)
    figure.patch.draw(renderer)


def sketch_matrix(confusion: Any, names: Any) -> Figure:
    """Take the place of `confusion_figure`, whose axes take longer to make than to draw."""
    small = Figure(figsize=(SIDE, SIDE))
    FigureCanvasAgg(small)
    small.text(0, 0, repr((confusion.tolist(), names)))
    return small


def sketch_metric(*shown: Any) -> bytes:
    """Take the place of `metric_picture`."""
    with figure(SIDE, SIDE) as (small, png):
        small.text(0, 0, repr(shown))
    return png.getvalue()


DRAWN: dict[tuple[Any, str], Any] = {
    (Figure, "draw"): Figure.draw,
    (page, "sections"): page.sections,
    (tensorboard, "confusion_figure"): confusion_figure,
    (charts, "metric_picture"): metric_picture,
}


@contextmanager
def drawing(*replaced: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for (owner, name), value in zip(DRAWN, replaced, strict=True):
            patched.setattr(owner, name, value)
        yield


def sketched() -> Any:
    """Within it figures are sketched, and `report.html` has no plots."""
    return drawing(sketch, lambda *_: [], sketch_matrix, sketch_metric)


def drawn() -> Any:
    """Within it figures are as users see them."""
    return drawing(*DRAWN.values())
