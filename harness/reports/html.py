"""Pages of one HTML file, which open from disk and ask for nothing from a network."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

WIDE = 800  # pixels of a picture that a phone shows part of
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]*)" ?/?>')


class Section(NamedTuple):
    """A part of a page below its text."""

    title: str
    text: str = ""  # Markdown
    plots: Sequence[str] = ()  # HTML: SVGs, which answer the mouse, or tables of coloured cells
    pictures: Sequence[bytes] = ()  # PNGs


def repeat_section(commands: Sequence[str]) -> list[Section]:
    """Return a section of the commands that made a run, the first one first; none where they are not known."""
    return [Section("The command that repeats it", "\n".join(["```", *commands, "```"]))] if commands else []


def page(markdown: str, pictures: Mapping[str, bytes], sections: Sequence[Section] = ()) -> str:
    """Return the HTML of a Markdown page, whose pictures are these PNGs by file name, and of sections below it.

    The heads of tables are buttons that sort them.
    """
    from jinja2 import Environment

    frame = Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    parts = []
    for section in sections:
        shown = _html(section.text) + "".join(_img(png, section.title) for png in section.pictures)
        parts.append({"title": section.title, "text": shown, "plots": section.plots})
    text = PICTURE.sub(
        lambda match: _img(pictures[match[2]], match[1]) if match[2] in pictures else match[1], _html(markdown)
    )
    return frame.render(title=markdown.partition("\n")[0].lstrip("# "), text=text, sections=parts)


def _html(markdown: str) -> str:
    """HTML of Markdown, with the tables of GitHub; what looks like HTML is text."""
    from markdown import Markdown

    converter = Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")
    converted: str = converter.convert(markdown)
    opened = converted.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return opened.replace("</table>", "</table></div>")


def _img(png: bytes, alt: str) -> str:
    data, kind = base64.b64encode(png).decode(), "scroll" if int.from_bytes(png[16:20]) > WIDE else "picture"
    return f'<div class="{kind}"><img alt="{alt}" src="data:image/png;base64,{data}"></div>'
