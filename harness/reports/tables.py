"""Tables as plain text and as Markdown, and the numbers in them."""

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from harness.start import printable

WIDTH = 110
NONE = "—"
MIN_COLUMN = 8


@dataclass
class Table:
    """Cells as text, under a header; the first `left` columns hold words, the others hold numbers."""

    header: list[str]
    rows: list[list[str]]
    left: int = 1

    def markdown(self) -> str:
        """Return a GitHub table with right-aligned numbers."""
        rule = [":--" if column < self.left else "--:" for column in range(len(self.header))]
        lines = [self.header, rule, *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def plain(self, width: int | None = None) -> str:
        """Align the cells in lines of at most `width` characters, by default as many as stdout has room for.

        Headers of numbers wrap where they must, then columns of words; what still has no room is left out and named.
        """
        width = room() if width is None else width
        header, *rows = ([printable(cell) for cell in row] for row in (self.header, *self.rows))
        body = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else [0] * len(header)
        widths = [max(pair) for pair in zip(body, map(len, header), strict=True)]
        words = [max(map(len, cell.split()), default=0) for cell in header]
        least = [MIN_COLUMN if i < self.left else max(body[i], words[i]) for i in range(len(header))]
        for part in (range(self.left, len(header)), range(self.left)):
            while _total(widths) > width and (wide := [i for i in part if widths[i] > least[i]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
        fitting = next((n for n in range(len(widths), self.left, -1) if _total(widths[:n]) <= width), self.left + 1)
        lines = [self._line(row[:fitting], widths[:fitting]) for row in [header, ["-" * w for w in widths], *rows]]
        left_out = [f"for want of room without: {'; '.join(header[fitting:])}"] if fitting < len(header) else []
        return "\n".join([*lines, *left_out])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        wrapped = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        pads = [str.ljust if column < self.left else str.rjust for column in range(len(row))]
        lines = zip_longest(*wrapped, fillvalue="")
        padded = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def room() -> int:
    """Return the characters of a printed line: 110, or what the terminal has."""
    return min(WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH) if sys.stdout.isatty() else WIDTH


def _wrap(cell: str, width: int) -> list[str]:
    """Break a cell into lines of at most `width` characters, after a space, comma, bracket or underscore if any."""
    lines = [""]
    for piece in re.findall(r"[^\s,(_/]*[\s,(_/]*", cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = lines[-1][:width], lines[-1][width:]
    return [line.rstrip() for line in lines]


def columns(cells: Mapping[str, Callable[[Any], str]], rows: Iterable[Any], left: int = 1) -> Table:
    """Make a table with a line for each row and a column for each function; the first `left` are words."""
    return Table(list(cells), [[cell(row) for cell in cells.values()] for row in rows], left)


def table_of(columns: Iterable[tuple[str, list[str]]], left: int = 1) -> Table:
    """Make a table of headings and cells, column by column; the first `left` are words."""
    header, cells = zip(*columns, strict=True)
    return Table(list(header), [list(row) for row in zip(*cells, strict=True)], left)


def paragraph(text: str, indent: str = "") -> str:
    """Wrap the text to the width of stdout; all lines but the first are indented."""
    options: Any = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, room(), **options)


def words(values: Mapping[str, Any]) -> str:
    """Return names with their values, such as `cores 2, gpus []`; what is None is left out."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def count(value: int | None) -> str:
    """Return an integer with thousands separators."""
    return NONE if value is None else f"{value:,}"


def short(value: float | None) -> str:
    """Return three significant digits, never in powers of ten."""
    if value is None:
        return NONE
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1e-3 else f"{value:.5f}"


def join_words(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`; or with another word before the last one."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
