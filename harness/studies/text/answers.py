"""Answers that nets write to prompts of the test: shown side by side, and judged by a function of the user's."""

import inspect
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput, reason
from harness.cli.classes import import_target
from harness.runs.files import read_text, write_json
from harness.runs.plans import FitOutcome, FitPlan
from harness.runs.records import NetRecord, reading
from harness.runs.session import Session
from harness.runs.tensorboard import log_text
from harness.studies import costs
from harness.studies.text.answers_section import Answer
from lit_modules.nets.generation import Sampling, check_writer, generate

FILE = "generations.json"  # in a net's folder
SHOWN = 12  # answers where no function judges them
JUDGED = 100  # answers where one does
TOKENS = 64  # of an answer
AT_ONCE = 16  # prompts that a net answers at the same time

Judge = Callable[[str, str], Any]  # of an answer and the reference


@dataclass(frozen=True)
class Asking:
    """What nets of a run are asked, and how answers are judged."""

    count: int
    tokens: int  # of an answer, at most
    judge: Judge | None

    @classmethod
    def of(cls, config: Namespace) -> "Asking":
        """Read the settings of a run; of an experiment without them nothing is asked."""
        settings = vars(config)
        path, count = settings.get("generated_metric"), settings.get("generated_prompts")
        judge = None if path is None else _judge(path)
        usual = (SHOWN if judge is None else JUDGED) if "generated_prompts" in settings else 0
        return cls(usual if count is None else count, settings.get("generated_tokens") or TOKENS, judge)


def _judge(path: str) -> Judge:
    function: Judge = import_target(path, "generated_metric")
    return function


def judging_settings(config: Namespace) -> tuple[Any, ...]:
    """Return what scores of answers depend on, the text of the function's module among it; () where none judges."""
    path = vars(config).get("generated_metric")
    if path is None:
        return ()
    module = inspect.getmodule(_judge(path))
    try:
        content = "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):  # it is written in another language
        content = ""
    return path, content, config.generated_prompts, config.generated_tokens, "all turns"


def check_answers(session: Session) -> None:
    """Raise BadInput for settings of answers beside other data, or a function that does not judge one."""
    config, data = session.config, cast("Any", session.data)
    questions = data.questions(1)
    for flag in ("generated_metric", "generated_prompts", "generated_tokens"):
        value = vars(config).get(flag)
        if value and not questions:
            why = "whose test has no prompts" if questions is None else "which has no prompts to answer"
            raise BadInput(flag, value, f"not allowed with `data {data.name}`, {why}; `data Chat` may have some")
    if questions and vars(config).get("generated_metric") is not None:
        reference = data.vocabulary.decode(questions[0].reference)
        judge_answer(Asking.of(config).judge, config.generated_metric, reference, reference)
        kept = (Path(config.out or "") / f"seed{config.seeds[0]}").glob(f"*/{FILE}") if config.resume else ()
        of_first_turns = any("turn" not in answer for file in kept for answer in json.loads(read_text(file)))
        if of_first_turns and any(question.turn > 1 for question in data.questions(Asking.of(config).count)):
            expected = "another folder: the run there is of a version that asked the first turn of a chat alone"
            raise BadInput("out", config.out, expected)


def judge_answer(judge: Judge | None, path: str | None, answer: str, reference: str) -> float | None:
    """Return a function's score of an answer, None without one; BadInput if it fails, or gives no finite number."""
    if judge is None:
        return None
    try:
        score = float(judge(answer, reference))
    except Exception as error:  # whatever a user's function does
        expected = f"a function (answer, reference) of two texts; of ({answer[:40]!r}, {reference[:40]!r}) it says"
        raise BadInput("generated_metric", path, f"{expected}: {reason(error)}") from error
    if not math.isfinite(score):
        raise BadInput("generated_metric", path, f"a function that gives a finite number; it gives {score}")
    return score


def add_answers(
    session: Session, plan: FitPlan, name: str, net: nn.Module, outcome: FitOutcome, record: NetRecord
) -> NetRecord:
    """Let a tested net answer, write its answers into its folder, and return its record with their scores.

    Answers that nothing judges are of the first seed alone.
    """
    asking, data = Asking.of(session.config), cast("Any", session.data)
    wanted = asking.count and plan.tested and plan.until is None and record.failed is None
    if not (wanted and (asking.judge or plan.seed == session.config.seeds[0])):
        return record
    questions = data.questions(asking.count)
    if not questions:  # plain texts ask none
        return record
    with outcome.autocast(), costs.alone(outcome.device):
        texts = [
            *_write(net, [question.prompt for question in questions], asking.tokens, data.end_tokens, outcome.device)
        ]
    decode, path, answers = data.vocabulary.decode, vars(session.config).get("generated_metric"), list[Answer]()
    for question, text in zip(questions, texts, strict=True):
        shown, expected, answer = data.show_prompt(question.asks), decode(question.reference), decode(text)
        score = judge_answer(asking.judge, path, answer, expected)
        answers.append(Answer(shown, expected, answer, score, question.turn))
    folder = plan.folder(session.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, [asdict(answer) for answer in answers])
    if session.tensorboard and answers:
        shown = "\n\n".join(f"{answer.prompt}\n--- {answer.answer}" for answer in answers[:SHOWN])
        log_text(folder, "generations", shown)
    if not asking.judge or not answers:
        return record
    scores = [answer.score or 0.0 for answer in answers]
    figures = {**record.figures, "test_generated": sum(scores) / len(scores)}
    return replace(record, figures=figures, samples={**record.samples, "test_answers": scores})


def _write(
    net: nn.Module, prompts: Sequence[Tensor], tokens: int, ends: Sequence[int], device: torch.device
) -> Iterator[Tensor]:
    """Continue prompts by the likeliest tokens; yield the answers without the token that ends them."""
    try:
        check_writer(net)
        cached = True
    except BadInput:  # whose cache does not give the logits of one pass
        cached = False
    for start in range(0, len(prompts), AT_ONCE):
        lengths = torch.tensor([len(prompt) for prompt in prompts[start : start + AT_ONCE]])
        rows = nn.utils.rnn.pad_sequence([*prompts[start : start + AT_ONCE]], batch_first=True)
        written = generate(
            net, rows.to(device), lengths.to(device), tokens, sampling=Sampling(0.0), ends=ends, cached=cached
        )
        for text, length in zip(written.tokens.cpu(), written.lengths.tolist(), strict=True):
            answer = text[:length]
            yield answer[:-1] if length and int(answer[-1]) in ends else answer


def read_answers(folder: Path, nets: Iterable[str]) -> dict[str, list[Answer]]:
    """Read the answers in the folders of a seed's nets, of those that have some."""
    answers = dict[str, list[Answer]]()
    for name in nets:
        path = folder / name / FILE
        if path.is_file():
            with reading(path, "out", "answers that this run has written, or no such file"):
                answers[name] = [Answer(**facts) for facts in json.loads(read_text(path))]
    return answers


def exact_match(answer: str, reference: str) -> bool:
    """Return whether an answer is the reference, but for white space around it."""
    return answer.strip() == reference.strip()
