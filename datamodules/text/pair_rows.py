"""Rows of texts that belong together, as data sets for embeddings have them: which columns are taken, and checks."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apprentice.errors import BadInput
from datamodules.files import find_column
from datamodules.text.conversations import NamedRow

# Columns of data sets that sentence-transformers trains on, in any case; of those that are there the first count.
PAIRS = (
    ("query", "positive"), ("anchor", "positive"), ("question", "answer"), ("query", "answer"), ("query", "passage"),
    ("query", "document"), ("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("text1", "text2"),
    ("premise", "hypothesis"), ("prompt", "response"),
)  # fmt: skip
SINGLE = ("text", "sentence", "query", "anchor", "question")
SCORES = ("score", "similarity", "similarity_score", "relatedness_score")
NEGATIVE = re.compile(r"negatives?(_?\d+)?", re.IGNORECASE)


class PairColumns(NamedTuple):
    """Names of the columns whose texts a row has, in their order, and of its score."""

    texts: tuple[str, ...]
    score: str | None = None

    def __str__(self) -> str:
        return ", ".join(self.texts) + (f"; score {self.score}" if self.score else "")


class TextRow(NamedTuple):
    """The k texts of a row in UTF-8, and its score."""

    texts: tuple[bytes, ...]
    score: float | None


def choose_columns(
    names: Sequence[str], columns: Sequence[str] | None, score: str | None, path: object, flag: str
) -> PairColumns:
    """Return the columns to read of those a path has: those that a user names, or else usual ones.

    A score is taken beside two texts alone, as that of more would be of one pair among them.

    Raises:
        BadInput: there is no such column, or there are no usual ones.
    """
    named = {"columns": columns or (), "score": () if score is None else (score,)}
    for option, wanted in named.items():
        for name in wanted:
            if name not in names:
                raise BadInput(f"data.{option}", name, f"a column of {path}: {', '.join(names) or 'it has none'}")
    texts = tuple(columns) if columns else _usual_texts(names)
    if not texts:
        expected = f"`data.columns COLUMN COLUMN` beside it; it has {', '.join(names) or 'none'}"
        raise BadInput(flag, path, expected)
    if score is not None and len(texts) != 2:
        raise BadInput("data.score", score, f"a score of two texts; a row has {', '.join(texts)}")
    return PairColumns(texts, (score or find_column(names, SCORES)) if len(texts) == 2 else None)


def _usual_texts(names: Sequence[str]) -> tuple[str, ...]:
    for pair in PAIRS:
        found = [find_column(names, [usual]) for usual in pair]
        if None not in found:
            negatives = sorted((name for name in names if NEGATIVE.fullmatch(name)), key=_number)
            return tuple(name for name in (*found, *negatives) if name is not None)
    single = find_column(names, SINGLE)
    return () if single is None else (single,)


def _number(negative: str) -> int:
    return int(re.sub(r"\D", "", negative) or 0)


def read_rows(
    rows: Iterable[NamedRow], chosen: PairColumns, flag: str, path: object, count: int | None = None
) -> Iterator[TextRow]:
    """Yield the texts of rows, `count` of each, or as many as the first has; a list in a column is several texts.

    Raises:
        BadInput: a row has another number of texts, an empty one, one that is no text, or a score that is no number.
    """
    for name, row in rows:
        texts = tuple(_texts(name, row, chosen.texts, flag, path))
        count = count or len(texts)
        if len(texts) != count:
            raise BadInput(flag, path, f"{count} texts in each row; {name} has {len(texts)}")
        yield TextRow(texts, None if chosen.score is None else _score(name, row, chosen.score, flag, path))


def _texts(name: str, row: Mapping[str, Any], columns: Sequence[str], flag: str, path: object) -> Iterator[bytes]:
    for column in columns:
        value = row.get(column)
        for text in value if isinstance(value, list) else [value]:
            if fault := _fault(text):
                raise BadInput(flag, path, f"a text in {column}; {name} has {fault}")
            yield str(text).encode()


def _fault(text: Any) -> str:
    if not isinstance(text, str):
        return "nothing" if text is None else f"a {type(text).__name__}"
    if not text.strip():
        return "an empty one"
    if "\0" in text:  # which would be padding
        return "a zero byte in it"
    return "half a surrogate pair in it" if text.encode(errors="replace").decode() != text else ""


def _score(name: str, row: Mapping[str, Any], column: str, flag: str, path: object) -> float:
    try:
        score = float(row[column])
    except (KeyError, TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise BadInput(flag, path, f"a number in {column}; {name} has {row.get(column)!r}")
    return score
