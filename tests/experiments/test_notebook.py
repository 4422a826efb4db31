"""The notebooks run from top to bottom, where they lie, and are committed with what a run gives."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import nbformat
import pytest

from tests.notebooks import FOLDER, code_cells, execute, read, texts, words_and_numbers


@dataclass
class Ran:
    """What a notebook has printed and drawn."""

    lines: list[str]
    pictures: int

    def after(self, *begins: str) -> list[str]:
        """What follows each of these words in the one line that begins with it."""
        found = [[line.removeprefix(words) for line in self.lines if line.startswith(words)] for words in begins]
        return [rest.strip() for (rest,) in found]


def distils(ran: Ran, **least: float) -> None:
    found = dict(line.split(" test accuracy ") for line in ran.lines if " test accuracy " in line)
    assert [net.strip() for net in found] == list(least)
    assert all(least[net.strip()] < float(value) <= 1 for net, value in found.items())
    assert ran.pictures == 2


def attends(ran: Ran) -> None:
    kinds = [f"{kind} differs by" for kind in ("auto", "math", "flash", "cached")]
    assert all(float(difference) < 1e-12 for difference in ran.after(*kinds))
    (refusal,) = ran.after("backend efficient: expected a kernel that serves attention of float64 dense on cpu;")
    assert refusal.startswith("torch says: No ")
    assert ran.after("tokens that changed:") == ["[6, 7, 8, 9]"]
    assert ran.after("causal:", "window 3:", "window 3, 1 sink:", "two texts in a row:", "padding:") == [
        "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]",
        "[1, 2, 3, 3, 3, 3, 3, 3, 3, 3]",
        "[1, 2, 3, 4, 4, 4, 4, 4, 4, 4]",
        "[1, 2, 3, 4, 1, 2, 3, 4, 5, 6]",
        "[0, 0, 0, 1, 2, 3, 4, 5, 6, 7]",
    ]
    for net in ("softmax", "hybrid"):
        losses = ran.after(f"{net} train/loss_epoch", f"{net} val/loss")
        trained, held_out = (float(curve.split()[-1]) for curve in losses)
        assert trained < 0.5 < 3 < held_out
        assert ran.after(f"{net} without a cache the same:") == ["True"]
    assert ran.after("in the poem:") == ["True"]
    for net in ("softmax", "hybrid"):
        assert ran.after(f"{net} has maps of") == ["blocks.0.attention blocks.1.attention"]
    growing, constant, near = (
        [float(x) for x in re.findall(r"[\d.]+ (?=bytes|of)", rest)]
        for rest in ran.after("softmax keeps Cache and Cache:", "hybrid keeps", "window 8, one key head keeps")
    )
    assert growing == [1024, 1024]
    assert constant[0] > constant[1] > 512 > 1 > near[1]
    assert ran.pictures == 4


def distributes(ran: Ran) -> None:
    assert all(float(x) < 1e-9 for x in ran.after("largest difference of a weight", "sharded differs by"))
    assert ran.after("steps", "losses of Forgetful", "losses of Curve") == ["44", "0", "4"]
    assert all(0.7 < float(accuracy) <= 1 for accuracy in ran.after("val/acc", "test/acc"))
    plain, exact = ran.after("1 plain", "2 plain"), ran.after("1 exact", "2 exact", "3 exact")
    assert len({*plain}) == 2
    assert len({*exact}) == 1
    assert {len(digest) for digest in plain + exact} == {64}
    assert ran.pictures == 1


def answers(ran: Ran) -> None:
    bits = {net: float(rest.removesuffix(" bits a byte")) for net, rest in zip(
        ("teacher", "ce", "kd"), ran.after("teacher  ", "ce       ", "kd       "), strict=True)}  # fmt: skip
    assert all(value < 5 for value in bits.values())
    assert bits["teacher"] < bits["ce"]
    questions = [line for line in ran.lines if re.fullmatch(r"What (does|is) \S+( do)?\?", line)]
    assert len(questions) == 4 + 3
    assert len([line for line in ran.lines if line.startswith("    student: ")]) == 3


def pipelines(ran: Ran) -> None:
    assert float(*ran.after("largest difference of a weight")) < 1e-9
    assert len({*ran.after("one loss", "two loss")}) == 1
    (refusal,) = ran.after("Forgot.pipeline_stages: expected modules whose composition is forward;")
    assert "shapes cannot be multiplied" in refusal
    schedules = ["GPipe 1", "GPipe 8", "1F1B 8", "Interleaved1F1B 8"]
    assert ran.after(*(f"{schedule} computations" for schedule in schedules)) == ["4", "32", "32", "64"]
    assert ran.pictures == 1


CHECKS: dict[str, Callable[[Ran], None]] = {
    "distillation": partial(distils, teacher=0.85, ce=0.85, kd=0.85, cosine=0.85),
    "your_own_teacher": partial(distils, teacher=0.85, ce=0.7, kd=0.7, at=0.7),
    "attention": attends,
    "language_models": answers,
    "strategies": distributes,
    "pipeline": pipelines,
}


def check(name: str, notebook: Any) -> None:
    """A notebook shows what it says, and no warning."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    CHECKS[name](Ran("".join(texts(notebook)).splitlines(), pictures))


def test_all_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_it_is_committed_with_its_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    check(name, notebook)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs_and_gives_what_is_committed(name: str) -> None:
    ran = execute(name)
    check(name, ran)
    (words, numbers), (kept_words, kept) = words_and_numbers(ran), words_and_numbers(read(name))
    assert words == kept_words, "python -m tests.notebooks writes what a run gives"
    assert numbers == pytest.approx(kept, rel=0.1, abs=0.05)  # float32 on another processor
