"""Tables as plain text and as Markdown, and the numbers in them."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from harness.console import printable

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
        """A GitHub table with right-aligned numbers."""
        rule = [":--" if column < self.left else "--:" for column in range(len(self.header))]
        lines = [self.header, rule, *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def plain(self, width: int = WIDTH) -> str:
        """Aligned text of at most `width` characters a line; columns of words wrap where they must."""
        header, *rows = ([printable(cell) for cell in row] for row in (self.header, *self.rows))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        while sum(widths) + 2 * (len(widths) - 1) > width:
            widest = max(range(self.left), key=lambda column: widths[column])
            if widths[widest] <= MIN_COLUMN:
                break
            widths[widest] -= 1
        return "\n".join(self._line(row, widths) for row in [header, ["-" * w for w in widths], *rows])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        wrapped = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        pads = [str.ljust if column < self.left else str.rjust for column in range(len(row))]
        lines = zip_longest(*wrapped, fillvalue="")
        padded = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _wrap(cell: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken after a space, comma, bracket or underscore where there is one."""
    lines = [""]
    for piece in re.findall(r"[^\s,(_/]*[\s,(_/]*", cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = lines[-1][:width], lines[-1][width:]
    return [line.rstrip() for line in lines]


def columns(cells: Mapping[str, Callable[[Any], str]], rows: Iterable[Any], left: int = 1) -> Table:
    """A line a row, a column a function that gives its cells; the first `left` are words."""
    return Table(list(cells), [[cell(row) for cell in cells.values()] for row in rows], left)


def paragraph(text: str) -> str:
    """The text in lines of at most 110 characters."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def words(values: Mapping[str, Any]) -> str:
    """Names with their values, such as `cores 2, gpus []`; what is None is left out."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def count(value: int | None) -> str:
    """An integer with thousands separators."""
    return NONE if value is None else f"{value:,}"


def short(value: float | None) -> str:
    """Three significant digits, never in powers of ten."""
    if value is None:
        return NONE
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1e-3 else f"{value:.5f}"


def flops_unit(flops: Sequence[float | None]) -> tuple[float, str]:
    """Size and name of one unit that suits all these costs."""
    largest = max((value for value in flops if value is not None), default=0.0)
    units = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"))
    return next((unit for unit in units if largest >= unit[0]), (1e6, "MFLOPs"))


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
