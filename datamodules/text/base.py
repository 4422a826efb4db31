"""The base of data sets of texts with a label for each token."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.text.chat_templates import Template
from datamodules.text.vocabulary import Subwords, Vocabulary


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

    def check_net(self, net: Any, whose: str) -> None:
        """Raise BadInput if a net's weights know the tokens of a Hugging Face tokenizer, and these are others."""
        if net.tokenizer is None:
            return
        self.split("train")
        if not (isinstance(self.vocabulary, Subwords) and self.vocabulary.same_as(Subwords(net.tokenizer))):
            expected = f"{net.tokenizer}, or one with its tokens: the weights of {whose} know no others"
            raise BadInput("data.tokenizer", self.tokenizer, expected)
