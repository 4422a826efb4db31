"""Pages of one HTML file, which open from disk and ask for nothing from a network."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# In Bokeh's script: MathJax, Google's maps and a font of icons, which it would load for plots that we don't draw, and
# the link of a logo, which ours have not.
NETWORK = re.compile(r"((?:src|href|_url)[=:])([\"`'])https://")
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]*)" ?/?>')


class Section(NamedTuple):
    """A part of a page below its text."""

    title: str
    text: str = ""  # Markdown
    plots: Sequence[Any] = ()  # of Bokeh
    pictures: Sequence[bytes] = ()  # PNGs


def repeat_section(commands: Sequence[str]) -> list[Section]:
    """Return a section of the commands that made a run, the first one first; none where they are not known."""
    return [Section("The command that repeats it", "\n".join(["```", *commands, "```"]))] if commands else []


def page(markdown: str, pictures: Mapping[str, bytes], sections: Sequence[Section] = ()) -> str:
    """Return the HTML of a Markdown page, whose pictures are these PNGs by file name, and of sections below it.

    Tables are sorted by a click on a column's head.
    """
    from jinja2 import Environment

    frame = Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    plots = [plot for section in sections for plot in section.plots]
    resources, script = "", ""
    divs: Sequence[str] = ()
    if plots:
        from bokeh.embed import components
        from bokeh.resources import Resources

        script, divs = components(plots)
        resources = NETWORK.sub(r"\1\2data:,", Resources(mode="inline", components=["bokeh"]).render_js())
    left, parts = iter(divs), []
    for section in sections:
        text = _html(section.text) + "\n".join(f'<img alt="" src="{_data(png)}">' for png in section.pictures)
        parts.append({"title": section.title, "text": text, "plots": [next(left) for _ in section.plots]})

    def embed(match: re.Match[str]) -> str:
        png = pictures.get(match[2])
        return match[1] if png is None else f'<img alt="{match[1]}" src="{_data(png)}">'

    text = PICTURE.sub(embed, _html(markdown))
    title = markdown.partition("\n")[0].lstrip("# ")
    return frame.render(title=title, text=text, sections=parts, resources=resources, script=script)


def _html(markdown: str) -> str:
    """HTML of Markdown, with the tables of GitHub; what looks like HTML is text."""
    from markdown import Markdown

    converter = Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")
    return converter.convert(markdown)


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
