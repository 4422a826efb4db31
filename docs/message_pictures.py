"""Draws docs/images/send_receive.svg and docs/images/hybrid.svg: messages between ranks, and ranks in two dimensions.

`python docs/message_pictures.py` writes them. The look is that of images/collectives.svg.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parent / "images"
STYLE = (
    "text { fill: #222; text-anchor: middle } .a { fill: #9ecbe8 } .b { fill: #f6d28c } .c { fill: #94d6bf } "
    ".s { fill: #ddd } .name { font-weight: bold; text-anchor: start } .small { font-size: 11px; fill: #555 } "
    ".left { text-anchor: start } rect { stroke: #555 } .ground, .none { fill: white } .ground { stroke: none } "
    ".none { stroke-dasharray: 3 3; stroke: #bbb } path { fill: none; stroke: #555; stroke-width: 1.5 } "
    ".data { stroke: #d9822b } .inside { stroke: #2a78b5 }"
)


def page(title: str, width: int, height: int, lines: Sequence[str]) -> str:
    """Return a picture of these lines on a white ground."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def arrow(x: int, y: int, to_x: int, to_y: int, kind: str = "") -> str:
    """Return a line whose end, a dot, is what receives."""
    shape = f' class="{kind}"' if kind else ""
    return f'<path{shape} d="M{x} {y}L{to_x} {to_y}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0"/>'


class Messages(NamedTuple):
    """What three ranks hold before and after, and the messages between, from a rank to another."""

    before: tuple[str, str, str]
    after: tuple[str, str, str]
    sent: tuple[tuple[int, int], ...]


MESSAGES = {
    "send, recv": Messages(("a", "", ""), ("a", "a", ""), ((0, 1),)),
    "each to the next": Messages(("a", "b", "c"), ("c", "a", "b"), ((0, 1), (1, 2), (2, 0))),
    "along a chain": Messages(("a", "b", "c"), ("a", "a+b", "a+b+c"), ((0, 1), (1, 2))),
}


def draw_messages() -> str:
    """Return the picture of `MESSAGES`: before on the left, after on the right of each panel."""
    lines = []
    for number, (name, messages) in enumerate(MESSAGES.items()):
        lines.append(f'<g id="{name}" transform="translate({50 + 225 * number} 8)">')
        lines.append(f'<text class="name" x="0" y="14">{name}</text>')
        for rank in range(3):
            y = 24 + 32 * rank
            if number == 0:
                lines.append(f'<text class="small" x="-25" y="{y + 17}">rank {rank}</text>')
            for x, held in ((0, messages.before[rank]), (108, messages.after[rank])):
                width = 26 if len(held) < 2 else 78
                look = (held if len(held) == 1 else "s") if held else "none"
                lines.append(f'<rect class="{look}" x="{x}" y="{y}" width="{width}" height="24"/>')
                if held:
                    lines.append(f'<text x="{x + width // 2}" y="{y + 17}">{held}</text>')
        lines += [arrow(28, 36 + 32 * source, 102, 36 + 32 * target) for source, target in messages.sent]
        lines.append("</g>")
    return page("What each of three ranks holds before and after messages", 690, 136, lines)


class Hybrid(NamedTuple):
    """Four ranks in two rows: what lies in a row together is one replica, or one set of shards."""

    layers: tuple[tuple[int, int], ...]  # of each rank: the first and the last of 16 quarters, four a layer, ...
    every_layer: bool  # ... or of the 4 quarters of each layer
    rows: tuple[str, str, str, str]  # of the batch, that each rank reads
    inside: str  # what is sent along a row
    between: str  # what is sent along a column


HYBRIDS = {
    "pipeline, data_parallel_size 2": Hybrid(
        ((0, 8), (8, 16)) * 2, False, ("0 to 3", "0 to 3", "4 to 7", "4 to 7"), "activations at the cut", "gradients"
    ),
    "fsdp, mesh {data: 2, tensor: 2}": Hybrid(
        ((0, 1), (2, 3), (1, 2), (3, 4)), True, ("0 to 3", "0 to 3", "4 to 7", "4 to 7"), "activations of each layer",
        "parameters and gradients",
    ),
    "hsdp, shard_size 2": Hybrid(
        ((0, 2), (2, 4)) * 2, True, ("0, 1", "2, 3", "4, 5", "6, 7"), "parameters and gradients",
        "gradients of the shard",
    ),
}  # fmt: skip


def draw_hybrids() -> str:
    """Return the picture of `HYBRIDS`."""
    lines = []
    for number, (name, hybrid) in enumerate(HYBRIDS.items()):
        lines.append(f'<g id="{name}" transform="translate({10 + 295 * number} 8)">')
        lines.append(f'<text class="name" x="0" y="14">{name}</text>')
        for rank in range(4):
            row, column = divmod(rank, 2)
            x, y = 150 * column, 28 + 112 * row
            lines.append(f'<rect class="ground" style="stroke: #555" x="{x}" y="{y}" width="116" height="66"/>')
            lines.append(f'<text class="small left" x="{x + 6}" y="{y + 15}">rank {rank}</text>')
            first, last = hybrid.layers[rank]
            for layer in range(4):
                left, skipped = x + 6 + 27 * layer, 0 if hybrid.every_layer else 4 * layer
                start, end = max(first - skipped, 0), min(last - skipped, 4)
                lines.append(f'<rect class="none" x="{left}" y="{y + 21}" width="24" height="16"/>')
                if start < end:
                    width = 6 * (end - start)
                    lines.append(f'<rect class="a" x="{left + 6 * start}" y="{y + 21}" width="{width}" height="16"/>')
            lines.append(f'<text class="small left" x="{x + 6}" y="{y + 55}">rows {hybrid.rows[rank]}</text>')
        for row in range(2):
            y = 61 + 112 * row
            lines += [arrow(120, y - 4, 146, y - 4, "inside"), arrow(146, y + 6, 120, y + 6, "inside")]
            between = arrow(54 + 150 * row, 98, 54 + 150 * row, 136, "data")
            lines += [between, arrow(66 + 150 * row, 136, 66 + 150 * row, 98, "data")]
        lines.append(
            f'<text class="small left" x="0" y="230" style="fill: #2a78b5">along a row: {hybrid.inside}</text>'
        )
        lines.append(f'<text class="small left" x="0" y="246" style="fill: #b06014">down: {hybrid.between}</text>')
        lines.append("</g>")
    return page("What each of four ranks stores of four layers, and what is sent, in two dimensions", 890, 266, lines)


if __name__ == "__main__":
    (IMAGES / "send_receive.svg").write_text(draw_messages(), "utf-8")
    (IMAGES / "hybrid.svg").write_text(draw_hybrids(), "utf-8")
