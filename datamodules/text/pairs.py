"""Texts that belong together, to embed and to rank: a text, a query and what answers it, two texts and a score."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from apprentice.errors import BadInput
from datamodules import fingerprints
from datamodules.base import InMemoryData
from datamodules.data_hooks import LIMITS
from datamodules.fingerprints import Fingerprint
from datamodules.memory import available_bytes
from datamodules.preparation import Preparation
from datamodules.splits import Split
from datamodules.text.conversation_files import LINES, PARQUET, TABLES, Source, Wanted, open_sources
from datamodules.text.pair_rows import TextRow, choose_columns, read_rows
from datamodules.text.python_help import PythonHelp

PAIR_FILES = Wanted("rows of texts", (*LINES, PARQUET, *TABLES), "JSON lines, Parquet or CSV")


@dataclass(frozen=True)
class TextRows:
    """Rows of k texts: bytes (n, k, L), the numbers (n, k) of the texts, and scores (n,) float64, if there are such."""

    inputs: Tensor
    labels: Tensor
    scores: Tensor | None
    groups: Tensor | None = None  # (n,) int64, of rows that say nearly the same; known of some sources

    def take(self, chosen: Tensor) -> Split:
        return Split(self.inputs[chosen], self.labels[chosen])

    def part(self, chosen: Tensor) -> "TextRows":
        """Return the rows at these (k,) places, whole."""
        scores, groups = (None if x is None else x[chosen] for x in (self.scores, self.groups))
        return TextRows(*self.take(chosen), scores, groups)

    def to(self, device: torch.device) -> "TextRows":
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


class Pairs(InMemoryData):
    """Rows of one text, of a query and a positive, perhaps with negatives, or of two texts and a score.

    Inputs (n, k, L) are bytes of UTF-8, then zeros: nets read texts, each in its own tokens. Labels (n, k) are numbers
    of the distinct texts, by which equal ones are known. Rows with an equal text are drawn into one part; beside a test
    set, rows whose first text is in it do not train.

    Args:
        path: a file of JSON lines, of CSV or TSV with a line of names, or of Parquet, or a data set of Hugging Face, by
            name or folder, whose split `test` is tested on if there is one; Parquet and data sets need the extra
            `datasets`. Default: questions about names of Python's library, and the first sentences of what its
            documentation says of them.
        columns: those of the texts, in their order, the query first; a list in a column is several texts. Default:
            `query` and `positive`, `anchor` and `positive`, `question` and `answer`, `sentence1` and `sentence2` and
            the like, then `negative`, `negative_1`, …; or `text` alone. A line says which.
        score: the column of the similarity of two texts; default: `score` and the like, if there is one.
        test_path: rows to test on, all of them unless `test_size` says less; default: drawn from `path`.
        max_bytes: of a text; longer ones are cut before a character that does not fit.
        batch_size: rows in a batch over all devices together, whatever their number.
        options: `train_size`, `test_size`, `validation_size`, `seed` and `partition` of InMemoryData.

    Raises:
        BadInput: when read, the data are absent, lack columns, have a row with another number of texts, with an empty
            text or with a score that is no number, or do not fit in memory.
    """

    task = "retrieval"
    free_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        columns: list[str] | None = None,
        score: str | None = None,
        test_path: str | Path | None = None,
        max_bytes: int = 1024,
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        if not isinstance(max_bytes, int) or max_bytes < 4:
            raise BadInput("data.max_bytes", max_bytes, "a whole number of bytes, at least 4")
        if self.labelled is not None:
            raise BadInput("data.labelled", self.labelled, "not allowed: students see no label")
        self.path, self.test_path = (None if p is None else str(p) for p in (path, test_path))
        self.columns, self.score, self.max_bytes = columns, score, max_bytes

    def read(self) -> tuple[TextRows, ...]:
        """Read the rows to train on and, if there are such, to test on; say which columns were taken."""
        sources = open_sources(self.path, self.test_path, PAIR_FILES)
        tables = list[list[TextRow]]()
        for source in sources:
            tables.append(self._read_source(source, len(tables[0][0].texts) if tables else None))
        if len({table[0].score is None for table in tables}) > 1:
            raise BadInput("data.test_path", self.test_path or self.path, "scores in both parts, or in none")
        numbers, size = _Numbers(), self.max_bytes
        if cut := sum(len(text) > size for table in tables for row in table for text in row.texts):
            self.say(f"{cut:,} texts are cut at {size:,} bytes")
        labels = [
            torch.tensor([[numbers[cut_bytes(text, size)] for text in row.texts] for row in table]) for table in tables
        ]
        distinct = pad_bytes([*numbers], sum(x.numel() for x in labels))
        rows = [
            TextRows(distinct[x], x, _scores(table), groups)
            for x, table, groups in zip(labels, tables, map(_groups, sources), strict=True)
        ]
        self.input_shape, self.label_shape = tuple(rows[0].inputs.shape[1:]), tuple(labels[0].shape[1:])
        return (self._without_tested(*rows), rows[1]) if len(rows) > 1 else (rows[0],)

    def _read_source(self, source: Source, count: int | None) -> list[TextRow]:
        """Read a source's rows of `count` texts."""
        rows = source.rows()
        first = next(rows, None)
        if first is None:
            raise BadInput(source.flag, source, "a file with rows of texts; this one is empty")
        chosen = choose_columns([*first[1]], self.columns, self.score, source, source.flag)
        table = list(read_rows(itertools.chain([first], rows), chosen, source.flag, source, count))
        self.say(f"{source}: {len(table):,} rows of {chosen}")
        return table

    def _without_tested(self, training: TextRows, test: TextRows) -> TextRows:
        """Return the training rows whose first text is not the first one of a row of the test."""
        known = torch.isin(training.labels[:, 0], test.labels[:, 0])
        if known.all():
            expected = "rows with other first texts than `data.path`: all of these are among them, and none trains"
            raise BadInput("data.test_path", self.test_path or self.path, expected)
        if known.any():
            self.say(f"{int(known.sum()):,} rows do not train, as their first texts are in the test's")
        return training.part((~known).nonzero().flatten())

    def near_duplicates(self, source: Any) -> Tensor:
        """Link rows that share a text, or that the source says are nearly equal."""
        rows, numbers = np.arange(len(source.labels)), source.labels.numpy()
        members = [*numbers.T] + ([] if source.groups is None else [source.groups.numpy() + numbers.max() + 1])
        size = max(int(x.max()) for x in members) + 1
        links = np.concatenate([np.stack([rows, len(rows) + x]) for x in members], axis=1)
        graph = coo_array((np.ones(links.shape[1], bool), tuple(links)), shape=(len(rows) + size, len(rows) + size))
        return torch.from_numpy(connected_components(graph, directed=False)[1][: len(rows)].astype(np.int64))

    def setup(self, stage: str | None = None) -> None:
        try:
            super().setup(stage)
        except BadInput as fault:
            if fault.argument != "data.group_duplicates":
                raise
            expected = "texts that repeat less often, or `data.test_path`: rows with an equal text stay in one part"
            raise BadInput("data.path", self.path, expected) from None

    def hold(self, source: Any, places: Tensor) -> TextRows:
        rows: TextRows = source.part(places)
        return rows

    def scores(self, part: str) -> Tensor | None:
        """The human scores (n,) float64 of the pairs of a part, if the data have such."""
        return self._text_rows(part).scores

    def texts(self, part: str, places: Sequence[int] | Tensor) -> list[tuple[str, ...]]:
        """The k texts of each row at places (n,) of a part."""
        chosen = self._text_rows(part).inputs[torch.as_tensor(places, dtype=torch.int64)]
        return [tuple(decode_bytes(text) for text in row) for row in chosen]

    def names_of(self, part: str, kind: str) -> list[str] | None:
        places = range(self.sizes[part])
        return [text for row in self.texts(part, places) for text in row] if kind == "text" else None

    def _text_rows(self, part: str) -> TextRows:
        rows: Any = self.split(part)
        return rows

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Bytes, as they are."""
        return inputs

    def fingerprint(self) -> Fingerprint:
        """Of texts and scores."""
        of_parts = map(self._text_rows, LIMITS)
        tensors = ((x.inputs, x.labels, *([] if x.scores is None else [x.scores])) for x in of_parts)
        return {part: fingerprints.of_tensors(*x) for part, x in zip(LIMITS, tensors, strict=True)}

    @property
    def net_arguments(self) -> dict[str, Any]:
        """Of nets that read bytes, of one text each; what classifies them is left out."""
        return {"input_shape": self.input_shape[-1:], "num_classes": 1}

    @property
    def preparation(self) -> Preparation:
        return Preparation(kind="bytes", shape=(self.max_bytes,))


class _Numbers(dict[bytes, int]):
    """Numbers texts in the order in which they are asked for."""

    def __missing__(self, text: bytes) -> int:
        return self.setdefault(text, len(self))


def _scores(rows: Sequence[TextRow]) -> Tensor | None:
    scores = [row.score for row in rows if row.score is not None]
    return torch.tensor(scores, dtype=torch.float64) if scores else None


def _groups(source: Source) -> Tensor | None:
    return torch.tensor([*source.groups().values()]) if isinstance(source, PythonHelp) else None


def cut_bytes(text: bytes, size: int) -> bytes:
    """Return the beginning of a text in UTF-8, of at most `size` bytes and whole characters."""
    return text if len(text) <= size else text[:size].decode(errors="ignore").encode()


def pad_bytes(texts: Sequence[bytes], copies: int) -> Tensor:
    """Return texts as (n, L) uint8, filled up with 0 to the longest; BadInput if so many rows don't fit in memory."""
    longest = max(map(len, texts))
    if longest * (len(texts) + 2 * copies) > available_bytes():
        expected = f"texts that fit in memory: {copies:,} of up to {longest:,} bytes; `data.max_bytes` cuts them"
        raise BadInput("data.path", f"{longest * copies:,} bytes", expected)
    rows = b"".join(text.ljust(longest, b"\0") for text in texts)
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(len(texts), longest)


def decode_bytes(text: Tensor) -> str:
    """Return the text of bytes (L,); zeros at the end fill it up."""
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
