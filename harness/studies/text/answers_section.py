"""The answers of nets to prompts of the test, side by side in report.html."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.reports.html import Section
from harness.reports.results import Results
from harness.reports.tables import NONE, Table
from harness.reports.uncertainty import crossed_interval

SHOWN = 12  # prompts
LONGEST = 700  # characters of a text that is shown
KEY = "test_answers"  # of the scores of answers in records
MARKS = re.compile(r"([\\`*_{}\[\]()#+.!~>-])")  # of Markdown


@dataclass(frozen=True)
class Answer:
    """What a net has written to a prompt."""

    prompt: str
    reference: str  # the response in the data
    answer: str
    score: float | None = None  # by the user's function


def section(results: Results, answers: Mapping[str, Sequence[Answer]]) -> list[Section]:
    """Return the section of the first prompts, each with the answers of all nets by name; none without answers."""
    if not answers:
        return []
    first = next(iter(answers.values()))
    parts = [_scores(results, len(first))]
    parts.append(f"Written by the nets of seed {results.seeds[0]}, the likeliest token each time.")
    for number, asked in enumerate(first[:SHOWN]):
        rows = [["reference", "", text_cell(asked.reference)]]
        for name, texts in answers.items():
            score = texts[number].score
            rows.append([name, "" if score is None else f"{score:g}", text_cell(texts[number].answer)])
        if all(answer.score is None for answer in first):
            table = Table(["net", "answer"], [[name, text] for name, _, text in rows], left=2)
        else:
            table = Table(["net", "score", "answer"], rows, left=3)
        parts.append(f"**{number + 1}.** {text_cell(asked.prompt)}\n\n{table.markdown()}")
    return [Section("Answers side by side", "\n\n".join(filter(None, parts)))]


def _scores(results: Results, count: int) -> str:
    """Return the mean score of each student, and its difference to its baseline over seeds and prompts."""
    rows = []
    for name, student in results.students.items():
        scores = [scores for scores in student.samples.get(KEY, []) if scores is not None]
        if scores:
            rows.append([name, f"{np.mean(np.array(scores)):.3f}", _difference(results, name, student.baseline)])
    if not rows:
        return ""
    path = results.config.get("generated_metric")
    explained = (
        f"`{path}` of the answers to {count} prompts of the test, a mean over seeds and prompts, and the difference to "
        "ce with its interval of 95 % over seeds and prompts together, of each comparison alone."
    )
    return f"{explained}\n\n{Table(['student', 'score', 'Δ to ce'], rows).markdown()}"


def _difference(results: Results, name: str, baseline: str) -> str:
    if name == baseline or baseline not in results.students:
        return NONE
    values = [results.students[net].samples.get(KEY, []) for net in (name, baseline)]
    pairs = [(a, b) for a, b in zip(*values, strict=False) if a is not None and b is not None]
    if not pairs:
        return NONE
    interval = crossed_interval(np.stack([np.array(a, float) - np.array(b, float) for a, b in pairs]))
    low, high = interval["low"], interval["high"]
    bounds = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{interval['mean']:+.3f}{bounds}"


def text_cell(text: str) -> str:
    """Return a text in a line of Markdown that shows it as it is."""
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    line = " ⏎ ".join(cut.strip().splitlines())
    return MARKS.sub(r"\\\1", line) or NONE
