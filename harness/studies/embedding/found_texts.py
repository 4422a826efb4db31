"""Queries of the test and the texts that a teacher and a student find for them, in report.html."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.reports.html import Section
from harness.reports.results import Results
from harness.reports.tables import Table
from harness.runs.files import read_text, write_json
from harness.runs.records import reading
from harness.runs.teacher_weights import TEACHER
from harness.studies.text.answers_section import text_cell
from lit_modules.embedding.neighbours import nearest
from lit_modules.embedding.ranking import find_corpus

FILE = "found.json"  # in a net's folder
SHOWN, RANKS = 6, 3  # queries, and texts of each


class Found(NamedTuple):
    """A query, and the texts that are nearest to it."""

    query: str
    texts: list[str]
    answers: list[bool]  # which of them answer it


def find(data: Any, embeddings: Tensor, numbers: Tensor) -> list[Found]:
    """Find the nearest documents of the first queries of a test set, given embeddings (n, k, D) and numbers (n, k).

    Of single texts, the nearest other ones.
    """
    rows, k = numbers.shape
    flat = embeddings.flatten(0, 1)
    if k == 1:
        places, _ = nearest(flat[:SHOWN], flat, RANKS, same=True)
        queries, answers = torch.arange(min(SHOWN, rows)), torch.zeros_like(places, dtype=torch.bool)
    else:
        corpus = find_corpus(numbers)
        first = corpus.queries.argsort()[:SHOWN]
        queries = corpus.queries[first]
        near, _ = nearest(flat[queries], flat[corpus.documents], RANKS + 1)
        near = torch.stack([row[row != own][:RANKS] for row, own in zip(near, corpus.own[first], strict=True)])
        wanted = {(int(q), int(d)) for q, d in corpus.pairs}
        answers = torch.tensor([[(int(q), int(d)) in wanted for d in row] for q, row in zip(first, near, strict=True)])
        places = corpus.documents[near]

    def text(place: Tensor) -> str:
        return str(data.texts("test", [int(place) // k])[0][int(place) % k])

    return [
        Found(text(query), [*map(text, row)], right.tolist())
        for query, row, right in zip(queries, places, answers, strict=True)
    ]


def write(folder: Path, found: Sequence[Found]) -> None:
    """Write what a net finds into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, [query._asdict() for query in found])


def read(folder: Path) -> list[Found]:
    """Read what `write` wrote; nothing if it did not."""
    path = folder / FILE
    if not path.is_file():
        return []
    with reading(path, "out", "what this run's nets have found, or no such file"):
        return [Found(**query) for query in json.loads(read_text(path))]


def section(results: Results, folder: Path, student: str) -> list[Section]:
    """Return the section of what teacher and student find, from the folders of a seed's nets."""
    by_net = {name: found for name in (TEACHER, student) if (found := read(folder / name))}
    if not by_net:
        return []
    parts = [f"The nearest texts by nets of seed {results.seeds[0]}; ✓ marks an answer of the data."]
    for number, query in enumerate(next(iter(by_net.values()))):
        parts.append(f"**{number + 1}.** {text_cell(query.query)}\n\n{_table(number, by_net).markdown()}")
    return [Section("What queries find", "\n\n".join(parts))]


def _table(number: int, by_net: Mapping[str, Sequence[Found]]) -> Table:
    columns = [
        [
            f"{'✓ ' if right else ''}{text_cell(text)}"
            for text, right in zip(found[number].texts, found[number].answers, strict=True)
        ]
        for found in by_net.values()
    ]
    rows = [[str(rank), *texts] for rank, texts in enumerate(zip(*columns, strict=True), 1)]
    return Table(["rank", *by_net], rows, left=1 + len(by_net))
