"""Answers to prompts of the test: the likeliest tokens of each net, judged by a user's function, shown side by side."""

import importlib
import json
import linecache
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import Chat
from experiments import kd
from harness.reports import html
from harness.reports.results import Results, load_results
from harness.reports.uncertainty import crossed_interval
from harness.runs.nets import load_net
from harness.studies.text.answers import judging_settings
from harness.studies.text.answers_section import KEY, Answer, _difference, section, text_cell
from tests.chats import chats, write_lines
from tests.commands import refused, results, start
from tests.figures import drawn

PROMPTS, TOKENS = 5, 6
SMALL = [
    "--data", "Chat", "--data.batch_size", "4", "--data.test_size", "9", "--data.validation_size", "0",
    *(f"--{net}.{name}={size}" for net in ("teacher", "student") for name, size in
      {"num_layers": 1, "num_heads": 1, "embed_dim": 8}.items()),
    "--teacher", "GPT", "--student", "GPT", "--only", "ce", "kd", "--trainer.max_epochs", "1",
    "--generated_prompts", str(PROMPTS), "--generated_tokens", str(TOKENS), "--trainer.precision", "64-true",
]  # fmt: skip


def count_letters(answer: str, reference: str) -> int:
    return len({*answer} & {*reference}) + len(answer)


def fail(answer: str, reference: str) -> float:
    raise ValueError("no number in it")


def questions(folder: Path) -> Path:
    lines = [{"prompt": f"{i // 2} and {i}|?"[: 6 + i % 3], "response": f"*{i}*\n" * (1 + i % 4)} for i in range(30)]
    return write_lines(folder / "questions.jsonl", lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    flags = [*SMALL, "--data.path", str(questions(folder)), "--seeds", "2"]
    with drawn():
        start(folder / "run", *flags, "--generated_metric", f"{__name__}.count_letters").check()
    return folder


def by_hand(net: Any, prompt: torch.Tensor, end: int) -> list[int]:
    """The likeliest tokens, one at a time, each from all before it."""
    text = prompt.tolist()
    for _ in range(TOKENS):
        with torch.no_grad():
            token = int(net(torch.tensor([text]))[0, -1].argmax())
        if token == end:
            break
        text.append(token)
    return text[len(prompt) :]


def test_answers_are_the_likeliest_tokens_and_judged_by_the_function(run: Path) -> None:
    data = Chat(run / "questions.jsonl", batch_size=4, test_size=9, validation_size=0)
    asked = data.questions(PROMPTS)
    prompts = [data.vocabulary.decode(question.prompt) for question in asked]
    assert len({*prompts}) == PROMPTS
    found = results(run / "run")
    rows = {"teacher": found["teacher"], **found["students"]}
    for seed in (0, 1):
        for name in rows:
            folder = run / "run" / f"seed{seed}" / name
            net, answers = load_net(folder, "out"), json.loads((folder / "generations.json").read_text())
            expected = [torch.tensor(by_hand(net, question.prompt, *data.end_tokens)) for question in asked]
            assert [answer["answer"] for answer in answers] == [*map(data.vocabulary.decode, expected)]
            references = [data.vocabulary.decode(question.reference) for question in asked]
            assert [answer["reference"] for answer in answers] == references
            for answer, prompt in zip(answers, prompts, strict=True):
                assert answer["reference"].startswith("*")
                assert answer["prompt"] in prompt
            scores = [count_letters(answer["answer"], answer["reference"]) for answer in answers]
            assert [answer["score"] for answer in answers] == scores == rows[name]["test_answers"][seed]
            assert rows[name]["test_generated"][seed] == pytest.approx(np.mean(scores))


def test_the_page_shows_them_side_by_side(run: Path) -> None:
    page = (run / "run" / "report.html").read_text()
    assert "Answers side by side" in page
    assert f"{__name__}.count_letters" in page
    assert "score of answers" in (run / "run" / "results.md").read_text()
    assert "<em>" not in page.partition("Answers side by side")[2].partition("<h2>")[0]  # of the references' stars


def test_all_turns_are_asked_after_the_true_ones(tmp_path: Path) -> None:
    """Each turn of a chat by its own prompt, with the data's turns before it; scores say how many they count."""
    path = write_lines(tmp_path / "chats.jsonl", chats(30))
    data = Chat(path, batch_size=4, test_size=9, validation_size=0)
    data.setup()
    rows = {chat["messages"][0]["content"]: chat["messages"] for chat in chats(30)}
    asked, shown = data.questions(99), []
    for question in asked:
        shown = [*(shown if question.turn > 1 else []), data.show_prompt(question.asks)]
        messages = rows[shown[0]][: 2 * question.turn]
        assert shown == [message["content"] for message in messages[::2]]
        assert data.vocabulary.decode(question.reference) == messages[-1]["content"]
        assert data.chat_template is not None
        assert question.prompt.tolist() == data.chat_template.prompt(messages[:-1]).tolist()
    firsts = sum(question.turn == 1 for question in asked)
    assert (firsts, len(asked)) == (9, sum(len(rows[data.show_prompt(q.asks)]) // 2 for q in asked if q.turn == 1))
    assert [q.turn for q in data.questions(3)] == [q.turn for q in asked[:3]]
    flags = [*SMALL, "--data.path", str(path), "--seeds", "2", "--generated_metric", f"{__name__}.count_letters"]
    with drawn():
        start(tmp_path / "run", *flags).check()
    answers = json.loads((tmp_path / "run" / "seed0" / "kd" / "generations.json").read_text())
    assert [answer["turn"] for answer in answers] == [question.turn for question in asked[:PROMPTS]]
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"of {PROMPTS} answers in {sum(q.turn == 1 for q in asked[:PROMPTS])} chats of the test" in page
    assert "turn 2." in page


def test_plain_texts_ask_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "plain.jsonl", [{"text": f"a text of {i} words"} for i in range(30)])
    kd.main(
        [*SMALL[:-6], "--data.path", str(path), "--data.text", "text", "--seeds", "1", "--out", str(tmp_path / "run")]
    )
    assert not [*(tmp_path / "run").rglob("generations.json")]
    assert "Answers side by side" not in (tmp_path / "run" / "report.html").read_text()


def test_only_answers_to_the_same_turn_stand_side_by_side(run: Path) -> None:
    loaded = Results.read(load_results(run / "run"))
    asked = {"teacher": [1, 2, 3, 1, 2], "ce": [1, 2, 1, 2, 1], "kd": [1, 2, 1, 2, 1]}
    answers = {
        name: [
            Answer("p", "r", f"{name}{sum(t == 1 for t in turns[: i + 1])}{turn}", None, turn)
            for i, turn in enumerate(turns)
        ]
        for name, turns in asked.items()
    }
    (shown,) = section(
        replace(loaded, students={name: replace(net, samples={}) for name, net in loaded.students.items()}), answers
    )
    for place in ("11", "12", "21", "22"):
        row = shown.text[shown.text.index(f"ce{place}") :]
        assert row.index(f"kd{place}") < 80
        assert f"teacher{place}" in shown.text
    assert "teacher13" not in shown.text


def test_an_interval_of_answers_takes_chats_as_units() -> None:
    """It is that of a ratio of sums over chats; of chats of one answer, that over answers."""
    generator = np.random.default_rng(0)
    scores = {name: generator.integers(5, size=(3, 12)).astype(float) for name in ("ce", "kd")}
    students = {name: Namespace(samples={KEY: values.tolist()}) for name, values in scores.items()}
    results: Any = Namespace(students=students)
    difference = scores["kd"] - scores["ce"]

    def shown(interval: Any) -> str:
        return f"{interval['mean']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]"

    assert _difference(results, "kd", "ce", np.ones(12)) == shown(crossed_interval(difference))
    turns = np.array([1, 2, 1, 1, 2, 3, 1, 1, 1, 2, 1, 1])
    sums, sizes = [], []
    for chat in range(1, (turns == 1).sum() + 1):
        inside = (turns == 1).cumsum() == chat
        sums.append(difference[:, inside].sum(1))
        sizes.append(inside.sum())
    mean, size = difference.mean(1, keepdims=True), np.mean(sizes)
    linear = mean + (np.stack(sums, 1) - mean * np.array(sizes)) / size  # Cochran, 6.5
    assert _difference(results, "kd", "ce", turns) == shown(crossed_interval(linear))


def test_a_text_is_shown_as_it_is() -> None:
    text = "a|b *c* _d_ <i>e</i> `f` [g](h)\n1. \\| #"
    table = f"| net | answer |\n| :-- | :-- |\n| kd | {text_cell(text).replace('|', chr(92) + '|')} |"
    page = html.page(f"# t\n\n{table}", {})
    cell = page.partition("kd</td>")[2].partition("</td>")[0].rpartition(">")[2]
    shown = cell.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert shown == text.replace("\n", " ⏎ ")


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same(run: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--data.path", str(run / "questions.jsonl"), "--seeds", "1", "--trainer.devices", "3"]
    start(tmp_path / "run", *flags, "--generated_metric", f"{__name__}.count_letters").check()
    for name in ("teacher", "ce", "kd"):
        one, three = (folder / "seed0" / name / "generations.json" for folder in (run / "run", tmp_path / "run"))
        assert one.read_text() == three.read_text()


WRONG = {
    "no such function": (
        ["--generated_metric", "tests.nothing.here"],
        "--generated_metric tests.nothing.here: exp",
    ),
    "no name": (["--generated_metric", "exact"], "--generated_metric exact: expected"),
    "it fails": (
        ["--generated_metric", f"{__name__}.fail"],
        f"--generated_metric {__name__}.fail: exp",
    ),
    "prompts": (["--generated_prompts", "-1"], "--generated_prompts -1: expected a number of answers"),
    "tokens": (["--generated_tokens", "0"], "--generated_tokens 0: expected a number of tokens"),
    "none": (["--generated_metric", f"{__name__}.fail", "--generated_prompts", "0"], "--generated_metric"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_settings_are_refused(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, begins = WRONG[what]
    base = [
        flag for flag in SMALL if flag not in {"--generated_prompts", "--generated_tokens", str(PROMPTS), str(TOKENS)}
    ]
    refused(kd.main, [*base, "--data.path", str(questions(tmp_path)), *flags], begins, "", tmp_path, capsys)


def test_other_data_have_no_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "Digits", "--generated_prompts", "3"]
    refused(kd.main, flags, "--generated_prompts 3: expected texts, ", "--data Digits", tmp_path, capsys)


def test_a_teachers_stored_score_is_not_that_of_another_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that an earlier run has kept beside the teacher's outputs have its function's text in their name."""
    monkeypatch.syspath_prepend(tmp_path)
    settings, config = [], Namespace(generated_metric="a_judge.score", generated_prompts=3, generated_tokens=None)
    for number in ("1", "1", "0.5"):
        (tmp_path / "a_judge.py").write_text(f"def score(answer, reference):\n    return {number}\n")
        monkeypatch.delitem(sys.modules, "a_judge", raising=False)
        importlib.invalidate_caches()
        linecache.checkcache()
        settings.append(judging_settings(config))
    assert settings[0] == settings[1] != settings[2]
    assert judging_settings(Namespace(generated_metric=None)) == ()
