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

FILE = "retrieved.json"  # in a net's folder
SHOWN, RANKS = 6, 3  # queries, and texts of each


class QueryResult(NamedTuple):
    """A query, and the texts that are nearest to it."""

    query: str
    texts: list[str]
    answers: list[bool]  # which of them answer it


def retrieve(data: Any, embeddings: Tensor, numbers: Tensor) -> list[QueryResult]:
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
        shown = corpus.queries.argsort()[:SHOWN]
        queries = corpus.queries[shown]
        ranked, _ = nearest(flat[queries], flat[corpus.documents], RANKS + 1)
        of_others = zip(ranked, corpus.own[shown], strict=True)  # a query does not retrieve itself
        documents = torch.stack([row[row != itself][:RANKS] for row, itself in of_others])
        pairs = {(int(query), int(document)) for query, document in corpus.pairs}
        rows_of_queries = zip(shown.tolist(), documents.tolist(), strict=True)
        answers = torch.tensor([[(query, document) in pairs for document in row] for query, row in rows_of_queries])
        places = corpus.documents[documents]

    def text(place: Tensor) -> str:
        return str(data.texts("test", [int(place) // k])[0][int(place) % k])

    return [
        QueryResult(text(query), [*map(text, row)], of_row.tolist())
        for query, row, of_row in zip(queries, places, answers, strict=True)
    ]


def write_results(folder: Path, query_results: Sequence[QueryResult]) -> None:
    """Write what a net retrieves into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, [result._asdict() for result in query_results])


def read_results(folder: Path) -> list[QueryResult]:
    """Read what `write_results` wrote; nothing if it did not."""
    path = folder / FILE
    if not path.is_file():
        return []
    with reading(path, "out", "what this run's nets have retrieved, or no such file"):
        return [QueryResult(**result) for result in json.loads(read_text(path))]


def section(results: Results, folder: Path, student: str) -> list[Section]:
    """Return the section of what teacher and student retrieve, from the folders of a seed's nets."""
    by_net = {name: read_results(folder / name) for name in (TEACHER, student)}
    by_net = {name: query_results for name, query_results in by_net.items() if query_results}
    if not by_net:
        return []
    parts = [f"The nearest texts by nets of seed {results.seeds[0]}; ✓ marks an answer of the data."]
    for number, result in enumerate(next(iter(by_net.values()))):
        parts.append(f"**{number + 1}.** {text_cell(result.query)}\n\n{_table(number, by_net).markdown()}")
    return [Section("What queries find", "\n\n".join(parts))]


def _table(number: int, by_net: Mapping[str, Sequence[QueryResult]]) -> Table:
    columns = [_column(query_results[number]) for query_results in by_net.values()]
    rows = [[str(rank), *texts] for rank, texts in enumerate(zip(*columns, strict=True), 1)]
    return Table(["rank", *by_net], rows, left=1 + len(by_net))


def _column(result: QueryResult) -> list[str]:
    marked = zip(result.texts, result.answers, strict=True)
    return [f"{'✓ ' if is_answer else ''}{text_cell(text)}" for text, is_answer in marked]
