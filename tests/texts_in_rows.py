"""Small sets of rows of texts."""

from pathlib import Path
from typing import Any

from datamodules import Pairs
from tests.chats import write_lines

THINGS = "apple", "river", "engine", "garden", "window", "pencil", "harbour"


def text_rows(count: int, texts: int = 3, scored: bool = False) -> list[dict[str, Any]]:
    """Rows of one text, of two, or of a query, its answer and negatives; every fifth query has a second answer."""
    rows = []
    for i in range(count):
        thing = f"{THINGS[i % len(THINGS)]} {i}"
        names = ["text"] if texts == 1 else ["query", "positive", *(f"negative_{j}" for j in range(1, texts - 1))]
        values = [f"What of {thing}?", f"The {thing} is there.", *(f"No {thing} in {j}" for j in range(texts))]
        rows.append(dict(zip(names, values, strict=False)))
        if scored:
            rows[-1]["score"] = i * 7 % 11 / 2
        if texts > 1 and not scored and i % 5 == 4:
            rows.append({**rows[-1], "positive": f"It has a {thing}."})
    return rows


def read_rows(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Pairs:
    """The data module of a file with these rows, in batches of 7."""
    sizes = {"batch_size": 7, "test_size": 12, "validation_size": 5}
    data = Pairs(write_lines(folder / "rows.jsonl", rows), **sizes | options)
    data.setup()
    return data
