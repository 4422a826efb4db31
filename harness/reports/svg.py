"""Pictures of a page as SVG: titles for the mouse, colours of a light or dark page, equal bytes if drawn again."""

import io
import json
import re
from collections.abc import Callable, Mapping
from html import escape, unescape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOK = {
    "svg.fonttype": "none", "svg.hashsalt": "report",  # texts stay texts; the same names of parts each time
    "font.family": "DejaVu Sans", "font.size": 11, "axes.labelsize": 11, "legend.fontsize": 11, "grid.color": GREY,
}  # fmt: skip
INCH = 72  # pixels
WIDE, HALF, HEIGHT = 760, 500, 340  # pixels: the width of a picture alone and of one of two side by side; the height
SMALLEST = 0.72  # of its width, below which a picture scrolls: smaller texts are hard to read
# What Matplotlib writes, and what a page has in its place.
OF_PAGE = {"#000000": "currentColor", "#ffffff": "var(--paper)", GREY: "var(--grey)", "xlink:href": "href"}
LEFT_OUT = re.compile(
    r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>"
    r"""| id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"|font-family: 'DejaVu Sans';""",
    re.DOTALL,
)
DRAWN = re.compile(r"<(?:path|use|text)\b[^>]*>")
DECIMALS = re.compile(r"(\.\d)\d+")  # of pixels, of which a tenth is small enough
MARKED = re.compile(r"""<g id=("{[^"]*}"|'{[^']*}')>""")


def mark(artist: Any, title: str = "", attributes: Mapping[str, str] = MappingProxyType({})) -> None:
    """Give an artist a title for the mouse, and attributes, in SVGs."""
    artist.set_gid(json.dumps({"title": title, **attributes}))  # Matplotlib writes it as the id of the artist's group


def svg(width: int, height: int, draw: Callable[["Figure"], None]) -> str:
    """Return an SVG of so many pixels, less in a narrow window, of a figure that `draw` fills."""
    from matplotlib.figure import Figure

    with look(**LOOK):
        drawn, buffer = Figure(figsize=(width / INCH, height / INCH), layout="constrained"), io.StringIO()
        draw(drawn)
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    content = buffer.getvalue().partition("<svg")[2].partition(">")[2]
    content = DRAWN.sub(lambda tag: DECIMALS.sub(r"\1", tag[0]), LEFT_OUT.sub("", content))
    for written, of_page in OF_PAGE.items():
        content = content.replace(written, of_page)
    content = MARKED.sub(_open_group, re.sub(r"\s*\n\s*", " ", content).replace("> <", "><").strip())
    narrow = round(SMALLEST * width)
    return f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px;min-width:{narrow}px">{content}'


def _open_group(match: re.Match[str]) -> str:
    attributes = json.loads(unescape(match[1][1:-1]))
    title = escape(attributes.pop("title"))
    opened = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    return f"<g{opened}>" + (f"<title>{title}</title>" if title else "")
