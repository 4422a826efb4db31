"""A teacher whose tokens are others than the students': in all (`teacher_tokenizer`), or in added ones alone."""

import hashlib
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn

from apprentice.errors import BadInput
from datamodules.text.base import TextData
from datamodules.text.vocabulary import token_texts
from harness.runs.arm_names import choice_at
from harness.runs.plans import Arm
from harness.runs.session import TOKENIZER, Session, load_data
from harness.runs.teacher_weights import TEACHER
from harness.studies.choices import is_from_teacher
from harness.studies.text.shared_tokens import NearVocabularies, say_left_out
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.identity import Origin
from lit_modules.nets.other_tokens import OtherTokens, TokenTexts
from lit_modules.objectives.text_objective import of_texts


class TeacherTokens:
    """The data in a teacher's own tokens, and the teacher as students of others ask it; nothing where they are one's.

    Attributes:
        near: the tokenizers, if they differ in added tokens alone; then the data are in the student's tokens.
        name: of the teacher's tokenizer, if its tokens are not the data's.
    """

    def __init__(self, config: Namespace) -> None:
        self.config, self.near = config, NearVocabularies.find(config)
        self.name = vars(config).get(TOKENIZER) if self.near is None else self.near.theirs.name
        if self.near is not None:
            config.data.init_args["tokenizer"] = self.near.ours.name
        self._data: TextData | None = None
        self._has_told = False  # what is left out of a teacher's tokens

    @contextmanager
    def data(self, session: Session) -> Iterator[None]:
        """Inside, a session's data are in the teacher's tokens."""
        if self.name is None:
            yield
            return
        if self._data is None:
            chosen, ours = self.config.data, cast("TextData", session.data)
            if "tokenizer" not in chosen.init_args:
                raise BadInput(TOKENIZER, self.name, f"texts; `data {chosen.name}` has no tokenizer")
            options = {**chosen.init_args, "tokenizer": self.name}
            options |= {"template": None} if "template" in options and self.near is None else {}
            choice = replace(chosen, init_args=options)
            self._data = cast("TextData", load_data(Namespace(data=choice, num_classes=None)))
            ours.check_same_texts(self._data, TOKENIZER, self.name)
            self._data.limit_parts(session.trainer())
        with session.with_data(self._data):
            yield

    def origins(self, session: Session) -> dict[str, Origin]:
        """Return what tells the tokenizer."""
        if self.name is None:
            return {}
        with self.data(session):
            data = cast("TextData", session.data)
            content = repr([data.vocabulary.content(), data.end_tokens])
        flag = TOKENIZER if self.near is None else f"{TEACHER} and its tokenizer"
        return {flag: Origin({}, hashlib.blake2b(content.encode(), digest_size=16).hexdigest())}

    def prepare(self, session: Session, teacher: nn.Module, arms: Iterable[Arm]) -> nn.Module:
        """Return the teacher, or one that is asked in the students' tokens.

        Raises:
            BadInput: a student is made of the teacher's weights, or its method compares tokens of one tokenizer.
        """
        name = self.name
        if name is None or self.near is not None:
            return self._prepare_near(session, teacher, arms)
        for arm in arms:
            objective = arm.objective(session.config)
            if is_from_teacher(session.config, arm.net):
                made = choice_at(session.config, arm.net).name
                raise BadInput(TOKENIZER, name, f"not allowed with `{arm.net} {made}`, whose tokens are the teacher's")
            texts = of_texts(objective)
            if (objective.uses_teacher or texts.teacher_writes) and not texts.any_tokenizer:
                method = f"ULD, or a method without a teacher, beside `{TOKENIZER}`"
                expected = f"{method}: it compares tokens of one tokenizer"
                raise BadInput(f"variants.{arm.name}", arm.method.name, expected)
        ours = _texts(session.data, "data.tokenizer")
        with self.data(session):
            return OtherTokens(teacher, ours, _texts(session.data, TOKENIZER))

    def _prepare_near(self, session: Session, teacher: nn.Module, arms: Iterable[Arm]) -> nn.Module:
        """Return a teacher of tokens that are the students', but for added ones; say what is left out of it."""
        near = self.near
        if near is not None:
            near.check_texts(cast("TextData", session.data))
            near.check_arms(self.config, arms)
            if isinstance(teacher, HuggingFaceLM):
                teacher = teacher.in_tokens(len(near.ours), near.shared)
        if not self._has_told:
            self._has_told = True
            say_left_out(session, teacher, near)
        return teacher


def _texts(data: Any, flag: str) -> TokenTexts:
    vocabulary = data.vocabulary
    known = {*(getattr(vocabulary, "characters", None) or ())}

    def encode(text: str) -> list[int]:
        """Tokens of a text, up to a character that there is no token for."""
        first = next((i for i, character in enumerate(text) if known and character not in known), len(text))
        tokens: list[int] = vocabulary.encode(text[:first], flag).tolist()
        return tokens

    return TokenTexts(token_texts(vocabulary, flag), encode, tuple(data.end_tokens), vocabulary.content())
