"""Rows of texts become bytes; rows with an equal text stay in one part, and what can't be read is named by its row."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import Pairs
from datamodules.text.pairs import cut_bytes
from lit_modules.nets import RNNClassifier
from lit_modules.nets.embedder import TextEmbedder
from tests.chats import write_lines
from tests.commands import bad_input
from tests.processes import Run

PARTS = "train", "validation", "test"
SIZES: dict[str, Any] = {"validation_size": 2, "test_size": 3}


def questions(count: int) -> list[dict[str, Any]]:
    return [{"query": f"{i} is what?", "positive": f"{i}, a number", "negative": f"{i} not"} for i in range(count)]


def read(path: Path, rows: list[dict[str, Any]], **options: Any) -> Pairs:
    data = Pairs(write_lines(path / "rows.jsonl", rows), **SIZES | options)
    data.setup()
    return data


def all_texts(data: Pairs) -> set[tuple[str, ...]]:
    return {row for part in PARTS for row in data.texts(part, range(data.sizes[part]))}


@pytest.mark.parametrize(("row", "texts", "line"), [
    ({"text": "one", "label": 3}, ("one",), "text"),
    ({"Query": "q", "other": "x", "positive": "p"}, ("q", "p"), "Query, positive"),
    ({"sentence1": "a", "sentence2": "b", "score": "0.5"}, ("a", "b"), "sentence1, sentence2; score score"),
    ({"negative_10": "z", "negative_2": "y", "anchor": "a", "positive": "p", "score": 1}, ("a", "p", "y", "z"),
     "anchor, positive, negative_2, negative_10"),
    ({"question": "q", "answer": "a", "negatives": ["m", "n"]}, ("q", "a", "m", "n"), "question, answer, negatives"),
])  # fmt: skip
def test_a_line_says_which_columns_were_taken(
    row: dict[str, Any], texts: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{name: numbered(value, i) for name, value in row.items()} for i in range(8)]
    data = read(tmp_path, rows)
    assert f"rows.jsonl: 8 rows of {line}\n" in capsys.readouterr().err
    assert all_texts(data) == {tuple(f"{text} {i}" for text in texts) for i in range(8)}
    scores = data.scores("test")
    assert (scores is not None) == ("; score" in line)
    assert scores is None or torch.equal(scores, torch.full((3,), 0.5, dtype=torch.float64))


def numbered(value: Any, i: int) -> Any:
    if isinstance(value, list):
        return [f"{text} {i}" for text in value]
    return value if value == "0.5" or not isinstance(value, str) else f"{value} {i}"


def test_samples_are_bytes_and_numbers_of_texts(tmp_path: Path) -> None:
    rows = [{"query": "größe", "positive": "same"}, {"query": "same", "positive": "longer text"}]
    data = read(tmp_path, [*rows, *questions(6)], columns=["query", "positive"], max_bytes=8)
    inputs, labels = (torch.cat([getattr(data.split(part), x) for part in PARTS]) for x in ("inputs", "labels"))
    assert inputs.dtype == torch.uint8
    assert inputs.shape == (8, 2, 8) == (8, *data.input_shape)
    assert labels.shape == (8, 2)
    assert labels.unique().tolist() == list(range(labels.max() + 1))
    same = inputs.flatten(0, 1)[:, None].eq(inputs.flatten(0, 1)).all(2)
    assert torch.equal(labels.flatten()[:, None] == labels.flatten(), same)
    assert ("größe", "same") in all_texts(data)
    assert ("same", "longer t") in all_texts(data)


@pytest.mark.parametrize(("size", "kept"), [(4, "aß"), (5, "aß€"[:2]), (6, "aß€"), (7, "aß€b"), (9, "aß€b")])
def test_a_text_is_cut_before_a_character_that_does_not_fit(size: int, kept: str) -> None:
    assert cut_bytes("aß€b".encode(), size).decode() == kept


def test_how_many_texts_are_cut_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, [{"text": "a" * i} for i in range(1, 12)], max_bytes=8)
    assert "Pairs: 3 texts are cut at 8 bytes\n" in capsys.readouterr().err


def test_rows_with_an_equal_text_are_drawn_into_one_part(tmp_path: Path) -> None:
    rows = [{"query": f"{i // 2}", "positive": f"p{(i + 1) // 2 if i % 8 else i}"} for i in range(64)]
    data = read(tmp_path, rows, test_size=16, validation_size=16)
    texts = [{*data.split(part).labels.flatten().tolist()} for part in PARTS]
    assert all(texts)
    assert sum(map(len, texts)) == len(set.union(*texts))


def test_documentation_is_read_by_default_and_its_groups_are_not_parted() -> None:
    data = Pairs()
    groups = data.near_duplicates(data.read()[0])
    assert data.input_shape[0] == 2
    assert len(groups) > 500 > len(groups.unique()) > 100
    assert all(text.startswith("What ") for text, _ in data.texts("test", [0, 1, 2]))


def test_rows_do_not_train_whose_first_text_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = write_lines(tmp_path / "test.jsonl", questions(3))
    data = read(tmp_path, questions(9), test_path=test, test_size=None)
    assert data.sizes == {"train": 4, "validation": 2, "test": 3}
    assert len(all_texts(data)) == 9
    assert "3 rows do not train, as their first texts are in the test's" in capsys.readouterr().err
    assert "all of these are among them" in bad_input(read, tmp_path, questions(3), test_path=test)


GOOD = {"sentence1": "a", "sentence2": "b", "score": 1.0}


@pytest.mark.parametrize(("row", "expected"), [
    (GOOD | {"sentence2": " "}, "a text in sentence2; line 2 has an empty one"),
    (GOOD | {"sentence2": None}, "a text in sentence2; line 2 has nothing"),
    (GOOD | {"sentence1": 3}, "a text in sentence1; line 2 has a int"),
    (GOOD | {"sentence1": "a\0"}, "a text in sentence1; line 2 has a zero byte in it"),
    (GOOD | {"sentence1": "\ud800"}, "a text in sentence1; line 2 has half a surrogate pair in it"),
    (GOOD | {"score": float("nan")}, "a number in score; line 2 has nan"),
    (GOOD | {"score": None}, "a number in score; line 2 has None"),
    (GOOD | {"sentence2": ["b", "c"]}, "2 texts in each row; line 2 has 3"),
])  # fmt: skip
def test_a_row_that_can_not_be_read_is_named(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    line = bad_input(read, tmp_path, [GOOD, row])
    assert line == f"data.path {tmp_path / 'rows.jsonl'}: expected {expected}"


@pytest.mark.parametrize(("options", "expected"), [
    ({"columns": ["a", "c"]}, "data.columns c: expected a column of {path}: a, b"),
    ({"score": "s"}, "data.score s: expected a column of {path}: a, b"),
    ({"columns": ["a"], "score": "b"}, "data.score b: expected a score of two texts; a row has a"),
    ({}, "data.path {path}: expected `data.columns COLUMN COLUMN` beside it; it has a, b"),
    ({"max_bytes": 3}, "data.max_bytes 3: expected a whole number of bytes, at least 4"),
    ({"labelled": 3}, "data.labelled 3: not allowed: students see no label"),
    ({"path": "rows.txt"}, ("data.path rows.txt: expected a file with rows of texts, or a data set of Hugging Face; "
     "there is none")),
])  # fmt: skip
def test_options_that_can_not_be_used_are_refused(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"a": "x", "b": "1"}])
    line = bad_input(lambda: Pairs(**{"path": path} | options).setup())
    assert line == expected.format(path=path)


def test_a_score_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    rows = [{"sentence1": f"a{i}", "sentence2": f"b{i}", "score": i} for i in range(9)]
    before = read(tmp_path, rows).fingerprint()
    assert read(tmp_path, rows).fingerprint() == before
    assert read(tmp_path, [row | {"score": 1} for row in rows]).fingerprint() != before


def test_csv_has_the_same_rows(tmp_path: Path) -> None:
    rows = questions(9)
    table = tmp_path / "rows.csv"
    table.write_text(
        "".join(f"{','.join(json.dumps(x) for x in line)}\n" for line in [[*rows[0]], *(r.values() for r in rows)])
    )
    data = Pairs(table, **SIZES)
    assert data.fingerprint() == read(tmp_path, rows).fingerprint()


@pytest.mark.extras("datasets")
def test_parquet_and_data_sets_have_the_same_rows(tmp_path: Path) -> None:
    run = Run(_check_sets, tmp_path, log=tmp_path / "log")
    assert run.wait() == 0, run.output


def _check_sets(folder: Path) -> None:
    warnings.simplefilter("ignore")
    import datasets

    rows = questions(9)
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(folder / "rows.parquet")
    datasets.DatasetDict(train=data, test=datasets.Dataset.from_list(questions(3))).save_to_disk(folder / "saved")
    drawn = Pairs(folder / "rows.parquet", **SIZES)
    assert drawn.fingerprint() == read(folder, rows).fingerprint()
    saved = Pairs(folder / "saved", validation_size=2)
    assert saved.sizes == {"train": 4, "validation": 2, "test": 3}


def test_a_net_that_reads_bytes_embeds_each_text_by_itself(tmp_path: Path) -> None:
    data = read(tmp_path, questions(9))
    net = RNNClassifier(8, 6, **data.net_arguments)
    embedder = TextEmbedder(net, data.input_shape).eval()
    inputs = data.samples("train", torch.arange(4)).inputs
    assert embedder.width == 6
    assert data.example.dtype == torch.uint8
    assert embedder(data.example).shape == (2, 3, 6)
    alone = [[embedder(text[None])[0] for text in row] for row in inputs]
    torch.testing.assert_close(embedder(inputs), torch.stack([torch.stack(row) for row in alone]))
