"""The built-in template of conversations, for characters or bytes: a control character for each role."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apprentice.errors import BadInput
from datamodules.text.conversations import Conversation
from datamodules.text.turns import ASSISTANT, CALLS, Message
from datamodules.text.vocabulary import Vocabulary

END = "\x03"  # after each turn
MARKS = {"system": "\x01", "user": "\x02", ASSISTANT: "\x04", "tool": "\x05"}  # before a turn, by its role
CONTROL = re.compile(f"[{END}{''.join(MARKS.values())}]")


class TokenizedConversation(NamedTuple):
    """The tokens of a conversation."""

    tokens: np.ndarray  # (n,) int64
    learned: np.ndarray  # (n,) bool
    sizes: np.ndarray  # (n,) int64, bytes in UTF-8 of each one's text; 0 of special tokens
    cut: int = 0  # learned ones that cross a border of a response

    def first(self, count: int) -> "TokenizedConversation":
        """Return so many of the first tokens."""
        return TokenizedConversation(self.tokens[:count], self.learned[:count], self.sizes[:count])


class MarkedTurns:
    """The built-in template, of characters or bytes: a control character for the role, the content, U+0003.

    U+0001 is before a system's turn, U+0002 a user's, U+0004 the assistant's, U+0005 a tool's. A plain text has U+0003
    at its end.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def key(self) -> str:
        return f"marked turns {self.vocabulary.characters!r}"

    def plain(self) -> None:
        return None

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        before = self.encode(Conversation("the conversation", tuple(messages))).tokens
        return np.concatenate([before, self.vocabulary.encode(MARKS[ASSISTANT]).numpy()])

    def ends(self) -> tuple[int, ...]:
        return (int(self.vocabulary.encode(END, "data.path")[0]),)

    ends_of_texts = ends

    def ends_turns(self) -> bool:
        return True

    def reads(self, key: str) -> bool:
        return False

    @staticmethod
    def characters(conversation: Conversation) -> set[str]:
        """Return the characters of a conversation, with those of the template."""
        contents = (message["content"] for message in conversation.messages)
        return {END, *MARKS.values()}.union(conversation.text or "", *contents)

    def encode(self, conversation: Conversation) -> TokenizedConversation:
        if conversation.tools or CALLS in conversation.keys:
            expected = "a tokenizer whose chat template writes tools: the built-in one writes none"
            raise BadInput("data.tokenizer", "bytes or characters", f"{expected}, and {conversation.name} has some")
        pieces = [(conversation.text + END, True)] if conversation.text is not None else []
        for i, message in enumerate(conversation.messages):
            mark = MARKS.get(message["role"])
            if mark is None:
                expected = f"roles of the built-in template, {', '.join(MARKS)}, in {conversation.name}"
                raise BadInput("data.messages", message["role"], expected)
            pieces += [(mark, False), (message["content"] + END, i in conversation.learned)]
        if CONTROL.search(
            "".join([conversation.text or "", *(message["content"] for message in conversation.messages)])
        ):
            expected = "texts without the control characters U+0001 to U+0005, which mark turns"
            raise BadInput("data.path", conversation.name, expected)
        tokens = [self.vocabulary.encode(piece, "data.path").numpy() for piece, _ in pieces]
        learned = [np.full(len(t), is_learned) for t, (_, is_learned) in zip(tokens, pieces, strict=True)]
        sizes = [self._sizes(piece) * is_learned for piece, is_learned in pieces]
        return TokenizedConversation(np.concatenate(tokens), np.concatenate(learned), np.concatenate(sizes))

    def _sizes(self, piece: str) -> np.ndarray:
        """Bytes of each token of a piece, whose last character is the template's."""
        is_bytes = self.vocabulary.characters is None
        letters = [1] * len(utf8(piece)) if is_bytes else [len(utf8(letter)) for letter in piece]
        return np.array([*letters[:-1], 0], np.int64)


def utf8(text: str) -> bytes:
    """Return a text's bytes in UTF-8; half a surrogate pair, which has none there, counts three."""
    return text.encode(errors="surrogatepass")
