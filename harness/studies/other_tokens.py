"""A teacher whose tokens are others than the students' (`--teacher_tokenizer`)."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from apprentice.errors import BadInput
from datamodules.token_texts import token_texts
from harness import cli
from harness.runs.plans import Arm
from harness.runs.session import TOKENIZER, Session
from harness.studies.choices import is_from_teacher
from lit_modules.nets.other_tokens import OtherTokens, TokenTexts


def in_tokens_of_students(session: Session, teacher: nn.Module, arms: Iterable[Arm]) -> nn.Module:
    """Return the teacher, or with `--teacher_tokenizer` one that is asked in the students' tokens.

    Raises:
        BadInput: a student is made of the teacher's weights, or its method compares tokens of one tokenizer.
    """
    name = session.config.teacher_tokenizer
    if name is None:
        return teacher
    for arm in arms:
        objective = arm.objective(session.config)
        if is_from_teacher(session.config, arm.net):
            made = cli.choice_at(session.config, arm.net).name
            raise BadInput(TOKENIZER, name, f"it left out beside --{arm.net} {made}, whose tokens are the teacher's")
        if (objective.uses_teacher or objective.teacher_writes) and not objective.any_tokenizer:
            expected = f"ULD, or a method without a teacher, beside --{TOKENIZER}: it compares tokens of one tokenizer"
            raise BadInput(f"variants.{arm.name}", arm.method.name, expected)
    ours = _texts(session.data, "data.tokenizer")
    with session.tokens_of_teacher():
        return OtherTokens(teacher, ours, _texts(session.data, TOKENIZER))


def _texts(data: Any, flag: str) -> TokenTexts:
    vocabulary = data.vocabulary
    known = {*(getattr(vocabulary, "characters", None) or ())}

    def encode(text: str) -> list[int]:
        """Tokens of a text, up to a character that there is no token for."""
        first = next((i for i, character in enumerate(text) if known and character not in known), len(text))
        tokens: list[int] = vocabulary.encode(text[:first], flag).tolist()
        return tokens

    return TokenTexts(token_texts(vocabulary, flag), encode, tuple(data.end_tokens))
