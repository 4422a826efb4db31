"""The base of data sets of texts with a label for each token."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.text.chat_templates import Template
from datamodules.text.vocabulary import Subwords, Vocabulary, name_tokens


class Question(NamedTuple):
    """A turn of a chat of the test, in tokens."""

    prompt: Tensor  # (t,), all that stands before it
    reference: Tensor  # (r,), the data's own response, without a token that ends it
    asks: Tensor  # (a,), the end of the prompt: what no earlier question has
    turn: int = 1  # of those that are learned in its chat


class TextData(InMemoryData):
    """Texts whose labels are tokens, such as those that follow.

    Attributes:
        block_size: tokens of a text at most.
        vocabulary: what tokens stand for; known after `setup`.
        tokenizer: the name of the vocabulary, as the user chose it.
        tokens_per_character: for nets that are judged by bits a character; a number, or one for each part by its name.
        tokens_per_byte: in its place, for nets that are judged by bits a byte.
        labels_are_answers: whether nets are judged by how many labels they predict.
        end_tokens: those that end a response; known after `setup`.
        has_prompts: whether texts are prompts with responses.
        chat_template: what makes tokens of turns; None of other texts; known after `setup`.
    """

    task = "tokens"
    given_to_nets = ("vocab_size", "block_size")
    block_size: int
    vocabulary: Vocabulary | Subwords
    tokenizer: str | None = None
    tokens_per_character: float | Mapping[str, float] = 1.0
    tokens_per_byte: float | Mapping[str, float] | None = None
    labels_are_answers: bool = False
    end_tokens: tuple[int, ...] = ()
    has_prompts: bool = False
    chat_template: Template | None = None

    @property
    def train_texts_repeat(self) -> bool:
        """Whether a training text is the same in each epoch, so that what a teacher says of its tokens can be kept."""
        return self.train_inputs_repeat

    @property
    def num_classes(self) -> int:
        self.split("train")
        return len(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, by the name that language models use."""
        return self.num_classes

    @property
    def task_arguments(self) -> dict[str, Any]:
        rates = {"tokens_per_character": self.tokens_per_character, "tokens_per_byte": self.tokens_per_byte}
        return {**rates, "answers": self.labels_are_answers}

    @property
    def module_arguments(self) -> dict[str, Any]:
        return {"end_tokens": self.end_tokens}

    def questions(self, count: int) -> list[Question] | None:
        """Return so many questions of the test, for nets to answer.

        None where samples are not prompts with responses.
        """
        return None

    def check_same_texts(self, other: "TextData", flag: str, value: str) -> None:
        """Raise BadInput for `flag` unless another data module has the same texts, in other tokens."""

    def all_tokens(self) -> Iterable[np.ndarray]:
        """Return the tokens (n,) of all texts, in any number of parts; none where these stand for nothing."""
        return ()

    def say_left_out(self) -> None:
        """Say which tokens of a tokenizer its model has no rows for."""
        if isinstance(self.vocabulary, Subwords) and (names := self.vocabulary.left_out):
            self.say(f"{self.tokenizer}: its model has no rows for {name_tokens(names)}; no text may have them")

    def check_prompts(self, net: Any, whose: str) -> None:
        """Raise BadInput for a net whose encoder reads prompts, if these texts have none."""
        if net.prompt_end is not None and not self.has_prompts:
            expected = f"Chat: the encoder of {whose} reads prompts, which these texts have not"
            raise BadInput("data", type(self).__name__, expected)

    def check_net(self, net: Any, whose: str, trained: bool = True) -> None:
        """Raise BadInput if a net's weights know the tokens of a Hugging Face tokenizer, and these are others.

        One that is `trained` may learn other added tokens at its rows for these numbers; a line says which.
        """
        self.check_prompts(net, whose)
        if net.tokenizer is None:
            return
        self.split("train")
        ours, theirs = self.vocabulary, Subwords(net.tokenizer)
        if isinstance(ours, Subwords) and ours.same_as(theirs):
            return
        if not (trained and isinstance(ours, Subwords) and ours.keeps_numbers_of(theirs)):
            expected = f"{net.tokenizer}, or one with its tokens: the weights of {whose} know no others"
            raise BadInput("data.tokenizer", self.tokenizer, expected)
        new, lost = ours.beyond(theirs), theirs.beyond(ours)
        learned = f"learns {name_tokens(new)} at its rows for their numbers" if new else ""
        left = f"is left without {name_tokens(lost)}" if lost else ""
        self.say(f"{whose.strip('`')} {', and '.join(filter(None, (learned, left)))}, as {ours.name} has its tokens")
