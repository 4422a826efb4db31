"""The answers of nets to prompts of the test, side by side in report.html."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from harness.reports.html import Section
from harness.reports.results import Results
from harness.reports.tables import NONE, Table
from harness.reports.uncertainty import crossed_interval

SHOWN = 12  # answers
LONGEST = 700  # characters of a text that is shown
KEY = "test_answers"  # of the scores of answers in records
MARKS = re.compile(r"([\\`*_{}\[\]()#+.!~>-])")  # of Markdown


@dataclass(frozen=True)
class Answer:
    """What a net has written as a turn of a chat of the test, after the data's own turns."""

    prompt: str  # what the chat's earlier answers have not shown
    reference: str  # the response in the data
    answer: str
    score: float | None = None  # by the user's function
    turn: int = 1  # of the turns that are learned


def section(results: Results, answers: Mapping[str, Sequence[Answer]]) -> list[Section]:
    """Return the section of the first questions, each with the answers of all nets by name; none without answers."""
    answers = {name: texts for name, texts in answers.items() if texts}
    if not answers:
        return []
    # A teacher of other tokens may have been asked other turns, where these cut a chat.
    first = next((answers[name] for name in results.students if name in answers), next(iter(answers.values())))
    texts_at = {name: dict(zip(_places(texts), texts, strict=True)) for name, texts in answers.items()}
    turns = np.array([answer.turn for answer in first])
    parts = [_scores(results, turns)]
    parts.append(f"Written by the nets of seed {results.seeds[0]}, the likeliest token each time.")
    if turns.max() > 1:
        parts[-1] += " Before each answer stand the turns of the data, not those that a net has written."
    for (chat, turn), answer in zip(_places(first), first[:SHOWN], strict=False):
        rows = [["reference", "", text_cell(answer.reference)]]
        for name, text in ((name, at[chat, turn]) for name, at in texts_at.items() if (chat, turn) in at):
            rows.append([name, "" if text.score is None else f"{text.score:g}", text_cell(text.answer)])
        if all(answer.score is None for answer in first):
            table = Table(["net", "answer"], [[name, text] for name, _, text in rows], left=2)
        else:
            table = Table(["net", "score", "answer"], rows, left=3)
        place = f"{chat}" + f", turn {turn}" * (turn > 1)
        parts.append(f"**{place}.** {text_cell(answer.prompt)}\n\n{table.markdown()}")
    return [Section("Answers side by side", "\n\n".join(filter(None, parts)))]


def _places(answers: Sequence[Answer]) -> list[tuple[int, int]]:
    """Return of each answer the number of its chat, and of its turn there."""
    turns = [answer.turn for answer in answers]
    return [*zip(accumulate(int(turn == 1) for turn in turns), turns, strict=True)]


def _scores(results: Results, turns: np.ndarray) -> str:
    """Return the mean score of each student, and its difference to its baseline over seeds and chats.

    Answers are to these turns (n,) of chats, one chat after the other.
    """
    rows = []
    for name, student in results.students.items():
        scores = [scores for scores in student.samples.get(KEY, []) if scores is not None]
        if scores:
            rows.append([name, f"{np.mean(np.array(scores)):.3f}", _difference(results, name, student.baseline, turns)])
    if not rows:
        return ""
    path = results.config.get("generated_metric")
    count, chats = len(turns), int((turns == 1).sum())
    of_all = f"{count} answers in {chats} chats" if chats < count else f"the answers to {count} prompts"
    explained = (
        f"`{path}` of {of_all} of the test, a mean over seeds and answers, and the difference to ce with its interval "
        f"of 95 % over seeds and {'chats' if chats < count else 'prompts'} together, of each comparison alone."
    )
    return f"{explained}\n\n{Table(['student', 'score', 'Δ to ce'], rows).markdown()}"


def _difference(results: Results, name: str, baseline: str, turns: np.ndarray) -> str:
    if name == baseline or baseline not in results.students:
        return NONE
    values = [results.students[net].samples.get(KEY, []) for net in (name, baseline)]
    pairs = [(a, b) for a, b in zip(*values, strict=False) if a is not None and b is not None]
    if not pairs:
        return NONE
    differences = np.stack([np.array(a, float) - np.array(b, float) for a, b in pairs])  # (seeds, answers)
    starts = np.flatnonzero(turns == 1)
    sizes = np.diff(starts, append=len(turns))  # answers of a chat
    of_chats = np.add.reduceat(differences, starts, axis=1) / sizes.mean()
    # Their mean is that over answers; they vary as the ratio of sums does: see `reports.samples`.
    of_chats = of_chats + of_chats.mean(1, keepdims=True) * (1 - sizes / sizes.mean())
    interval = crossed_interval(of_chats)
    low, high = interval["low"], interval["high"]
    bounds = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{interval['mean']:+.3f}{bounds}"


def text_cell(text: str) -> str:
    """Return a text in a line of Markdown that shows it as it is."""
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    line = " ⏎ ".join(cut.strip().splitlines())
    return MARKS.sub(r"\\\1", line) or NONE
