"""A teacher whose tokenizer differs from that of the data in added tokens alone: which ones are compared, and said."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from apprentice.batch import label_mask
from apprentice.errors import BadInput
from datamodules.text.base import TextData
from datamodules.text.vocabulary import Subwords, name_tokens
from harness import cli
from harness.runs.arm_names import STUDENT, choice_at
from harness.runs.launch import is_main_process
from harness.runs.plans import Arm
from harness.runs.session import TOKENIZER, Session
from harness.runs.teacher_weights import TEACHER, TEACHERS
from harness.studies.choices import is_from_teacher
from harness.studies.from_teachers import draw_texts
from harness.studies.teachers import has_trained_teacher
from lit_modules.nets.base import Net, evaluating
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.shared_tokens import SharedTokens, mass_outside

BLOCK = 2**24  # tokens that are searched at once
OWN = {None, "bytes", "characters"}  # vocabularies that are no tokenizer's


class NearVocabularies(NamedTuple):
    """Tokenizers of the data and of a teacher that differ in added tokens alone."""

    ours: Subwords
    theirs: Subwords
    shared: SharedTokens

    @classmethod
    def find(cls, config: Namespace) -> "NearVocabularies | None":
        """Match the tokenizer of the chosen teacher with that of the data, by default the student's.

        None if they are the same, or differ in more than added tokens.
        """
        theirs, options = _tokenizer_of(config, TEACHER), config.data.init_args
        ours = options.get("tokenizer", "bytes") or _tokenizer_of(config, STUDENT)
        is_chosen = vars(config).get(TOKENIZER) is not None or vars(config).get(TEACHERS)
        if is_chosen or ours == theirs or {ours, theirs} & OWN:
            return None
        data, teacher = Subwords(str(ours)), Subwords(str(theirs))
        if data.same_as(teacher):
            return None
        tables = data.numbers(), teacher.numbers()
        ends = data.tokenizer.eos_token, teacher.tokenizer.eos_token
        added = data.added() | teacher.added()
        shared = SharedTokens.match(len(data), *tables, added, None if None in ends else ends)
        return shared and cls(data, teacher, shared)

    def check_texts(self, data: TextData) -> None:
        """Raise BadInput if a text has a token that the teacher lacks."""
        absent = self.shared.absent.numpy()
        parts = (x[i : i + BLOCK] for x in data.all_tokens() for i in range(0, len(x), BLOCK))
        if there := sorted({int(n) for part in parts for n in np.unique(part[np.isin(part, absent)])}):
            names = name_tokens(_texts_of(self.ours, there))
            template = "another `data.template`, or " if hasattr(data, "template") else ""
            ways_out = f"{template}`data.tokenizer {self.theirs.name}`, whose tokens students then learn"
            expected = f"texts without {names}, which {self.theirs.name} lacks: {ways_out}"
            raise BadInput("data.tokenizer", self.ours.name, expected)

    def check_arms(self, config: Namespace, arms: Iterable[Arm]) -> None:
        """Raise BadInput if a student is made of the teacher's weights, whose tokens have other numbers."""
        for arm in arms:
            if is_from_teacher(config, arm.net) and not self.shared.keeps_numbers:
                expected = f"{self.theirs.name} beside `{arm.net} {choice_at(config, arm.net).name}`, a part of it"
                raise BadInput("data.tokenizer", self.ours.name, expected)

    def describe(self) -> tuple[list[str], str]:
        """Return what says which tokens of the teacher's are left out, and the end of a line, which it lacks."""
        kept = {*self.shared.kept().tolist()}
        rest = _texts_of(self.theirs, [n for n in range(len(self.theirs)) if n not in kept])
        lacks = name_tokens(_texts_of(self.ours, self.shared.absent.tolist()))
        line = f"{len(kept):,} of its {len(self.theirs):,} tokens are shared with {self.ours.name}"
        left_out = f", not {name_tokens(rest)}" if rest else ""
        return [line + left_out], f"; it lacks {lacks}, which no text has" if lacks else ""


def _tokenizer_of(config: Namespace, key: str) -> str | None:
    chosen: Any = vars(config).get(key)
    is_net = isinstance(chosen, cli.Choice) and issubclass(chosen.target, Net)
    return chosen.target.tokenizer_from(chosen.init_args) if is_net else None


def _texts_of(vocabulary: Subwords, numbers: Sequence[int]) -> list[str]:
    return [str(text) for text in vocabulary.tokenizer.convert_ids_to_tokens(numbers)]


def say_left_out(session: Session, teacher: nn.Module, near: NearVocabularies | None) -> None:
    """Say which rows of a teacher are compared with none of its students', and what it says of them.

    A teacher that is not loaded is not asked.
    """
    parts, lacks = ([], "") if near is None else near.describe()
    if isinstance(teacher, HuggingFaceLM) and is_main_process():
        parts += _measure(session, teacher, near)
    if parts:
        name = near.theirs.name if near is not None else getattr(teacher, "name", "")
        session.tell(f"teacher {name}: {'; '.join(parts)}{lacks}")


def _measure(session: Session, teacher: HuggingFaceLM, near: NearVocabularies | None) -> list[str]:
    """Return how many of a model's rows stand for no token, and its probability of all that are left out.

    That is the mean over the places of some training texts that are learned.
    """
    kept = torch.arange(teacher.vocab_size) if near is None else near.shared.kept()
    rows: int = teacher.model.config.get_text_config().vocab_size
    if rows == len(kept):
        return []
    empty = rows - (teacher.vocab_size if near is None else len(near.theirs))
    texts, labels = draw_texts(session.data, session.config.seeds[0])
    with evaluating(teacher):
        shares = [  # text by text: a row has the logits of all rows
            mass_outside(teacher.row_logits(text[None])[0][counts], kept)
            for text, counts in zip(texts, label_mask(labels), strict=True)
        ]
    share, when = float(torch.cat(shares).mean()), "" if has_trained_teacher(session) else ", before its training"
    padding = [f"{empty:,} of its {rows:,} rows stand for no token"] if empty else []
    return [*padding, f"what is left out has {100 * share:.2g} % of its probability on {len(texts)} texts{when}"]
