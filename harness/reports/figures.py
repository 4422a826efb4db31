"""Pictures drawn by Matplotlib: no backend, style or figure of the caller changes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes a second to be imported
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Any

GREY = "#555555"
# For all eyes (Okabe and Ito, "Color Universal Design", 2008), without their yellow, which is faint on white.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
LOOK = {
    "axes.prop_cycle": f"cycler('color', {[*COLORS, '#999999']})",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.titlesize": 10, "axes.titlecolor": GREY, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


@contextmanager
def look(**more: Any) -> Iterator[None]:
    """Draw in our style within the block."""
    import warnings

    import matplotlib.style

    with matplotlib.style.context(["default", {**LOOK, **more}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in a script that the font lacks
        yield


@contextmanager
def figure(width: float = 4, height: float = 3) -> Iterator[tuple["Figure", io.BytesIO]]:
    """A Figure on Agg of so many inches, and a buffer that holds its PNG after the block."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with look():
        drawn, buffer = Figure(figsize=(width, height), dpi=120, layout="constrained"), io.BytesIO()
        FigureCanvasAgg(drawn)
        yield drawn, buffer
        drawn.savefig(buffer, format="png")
