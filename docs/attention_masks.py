"""Draws docs/images/attention_masks.svg, what each token sees, from the layers themselves.

`python docs/attention_masks.py` writes it. Queries and keys are 0, so that a token takes the same of all that it sees,
but for what the layer itself adds to scores.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_modules.nets import Alibi, LinearAttention, SelfAttention, mask_texts
from lit_modules.nets.attention.windowed import WindowedLinearAttention

FILE = Path(__file__).parent / "images" / "attention_masks.svg"
TOKENS, CELL, PANEL = 8, 14, 140
STYLE = (
    "text { fill: #222; text-anchor: middle } .ground { fill: white } .softmax { fill: #2a78b5 } "
    ".linear { fill: #d9822b } path { stroke: white } .none { fill: none; stroke: #999 }"
)


@torch.no_grad()
def weights(layer: Any, mask: Tensor | None = None) -> Tensor:
    """(T, T), of the first head, the steepest of ALiBi's."""
    nn.init.zeros_(layer.qkv.weight)
    nn.init.zeros_(layer.qkv.bias)
    found: Tensor = layer.weights(torch.zeros(1, TOKENS, 8), mask)[0, 0]
    return found


def panels() -> dict[str, list[tuple[str, Tensor]]]:
    """The parts of each panel, each with its colour."""
    places = torch.arange(TOKENS)
    packed = mask_texts((places >= 3).long()[None] * 3)
    soft = {
        "all tokens": weights(SelfAttention(8, 2)),
        "causal": weights(SelfAttention(8, 2, causal=True)),
        "window=3": weights(SelfAttention(8, 2, causal=True, window=3)),
        "window=3, sinks=1": weights(SelfAttention(8, 2, causal=True, window=3, sinks=1)),
        "position=Alibi()": weights(SelfAttention(8, 8, causal=True, position=Alibi())),
        "mask_texts(starts)": weights(SelfAttention(8, 2, causal=True), packed),
        "padding mask": weights(SelfAttention(8, 2, causal=True), places[None] >= 2),
    }
    made = {name: [("softmax", found)] for name, found in soft.items()}
    made["linear"] = [("linear", weights(LinearAttention(8, 2)))]
    windowed = weights(WindowedLinearAttention(8, 2, window=3))
    near = places[:, None] - places < 3
    made["windowed, window=3"] = [("softmax", windowed * near), ("linear", windowed * ~near)]
    return made


def cells(colour: str, shares: Tensor) -> list[str]:
    """Return one path for all cells of each shade."""
    shades: dict[float, str] = {}
    for i, row in enumerate(shares.tolist()):
        for j, share in enumerate(row):
            if shade := round(share, 2):
                shades[shade] = shades.get(shade, "") + f"M{j * CELL} {24 + i * CELL}h{CELL}v{CELL}h-{CELL}z"
    return [f'<path class="{colour}" fill-opacity="{shade}" d="{path}"/>' for shade, path in shades.items()]


def draw() -> str:
    """Return the picture: rows are queries, columns keys, the darker the larger the weight in its row."""
    parts = panels()
    width, height = 5 * PANEL, 2 * (PANEL + 10)
    title = "What a token, a row, sees of the tokens, columns, under each mask"
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for number, (name, colours) in enumerate(parts.items()):
        x, y = 14 + number % 5 * PANEL, number // 5 * (PANEL + 10)
        side = TOKENS * CELL
        lines.append(f'<g transform="translate({x} {y})"><text x="{side // 2}" y="16">{name}</text>')
        lines.append(f'<rect class="none" y="24" width="{side}" height="{side}"/>')
        largest = torch.stack([part for _, part in colours]).sum(0).amax(-1, keepdim=True).clamp(min=1e-9)
        for colour, part in colours:
            lines += cells(colour, part / largest)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(draw(), "utf-8")
