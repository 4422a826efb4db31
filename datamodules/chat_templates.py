"""Conversations to tokens, and which of them are learned: an assistant's turns with the tokens that end them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from apprentice.errors import BadInput, reason
from datamodules.conversations import ASSISTANT, Conversation, Message
from datamodules.text import Subwords, Vocabulary

END = "\x03"  # after each turn of the built-in template
MARKS = {"system": "\x01", "user": "\x02", ASSISTANT: "\x04", "tool": "\x05"}  # before a turn, by its role
CONTROL = re.compile(f"[{END}{''.join(MARKS.values())}]")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "\u27earesponse\u27eb"  # in place of a content, to see where a template puts it


class Encoded(NamedTuple):
    """The tokens of a conversation."""

    tokens: np.ndarray  # (n,) int64
    learned: np.ndarray  # (n,) bool
    sizes: np.ndarray  # (n,) int64, bytes in UTF-8 of each one's text; 0 of special tokens
    cut: int = 0  # learned ones that cross a border of a response

    def first(self, count: int) -> "Encoded":
        """Return so many of the first tokens."""
        return Encoded(self.tokens[:count], self.learned[:count], self.sizes[:count])


class Template(Protocol):
    """What makes tokens of a conversation."""

    def encode(self, conversation: Conversation) -> Encoded:
        """Tokens of a conversation; BadInput if it does not fit."""

    def key(self) -> str:
        """What determines the tokens."""

    def ends(self) -> tuple[int, ...]:
        """Tokens that end a response."""


class MarkedTurns:
    """The built-in template, of characters or bytes: a control character for the role, the content, U+0003.

    U+0001 is before a system's turn, U+0002 a user's, U+0004 the assistant's, U+0005 a tool's. A plain text has U+0003
    at its end.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def key(self) -> str:
        return f"marked turns {self.vocabulary.characters!r}"

    def ends(self) -> tuple[int, ...]:
        return (int(self.vocabulary.encode(END, "data.path")[0]),)

    @staticmethod
    def characters(conversation: Conversation) -> set[str]:
        """Return the characters of a conversation, with those of the template."""
        contents = (message["content"] for message in conversation.messages)
        return {END, *MARKS.values()}.union(conversation.text or "", *contents)

    def encode(self, conversation: Conversation) -> Encoded:
        pieces = [(conversation.text + END, True)] if conversation.text is not None else []
        for message in conversation.messages:
            mark = MARKS.get(message["role"])
            if mark is None:
                expected = f"roles of the built-in template, {', '.join(MARKS)}, in {conversation.name}"
                raise BadInput("data.messages", message["role"], expected)
            pieces += [(mark, False), (message["content"] + END, message["role"] == ASSISTANT)]
        if CONTROL.search(
            "".join([conversation.text or "", *(message["content"] for message in conversation.messages)])
        ):
            expected = "texts without the control characters U+0001 to U+0005, which mark turns"
            raise BadInput("data.path", conversation.name, expected)
        tokens = [self.vocabulary.encode(piece, "data.path").numpy() for piece, _ in pieces]
        learned = [np.full(len(t), is_learned) for t, (_, is_learned) in zip(tokens, pieces, strict=True)]
        sizes = [self._sizes(piece) * is_learned for piece, is_learned in pieces]
        return Encoded(np.concatenate(tokens), np.concatenate(learned), np.concatenate(sizes))

    def _sizes(self, piece: str) -> np.ndarray:
        """Bytes of each token of a piece, whose last character is the template's."""
        is_bytes = self.vocabulary.characters is None
        letters = [1] * len(_utf8(piece)) if is_bytes else [len(_utf8(letter)) for letter in piece]
        return np.array([*letters[:-1], 0], np.int64)


class ChatTemplate:
    """A chat template of a Hugging Face tokenizer: its own, or the text of another one.

    Learned tokens are those that the template marks by `{% generation %}`. Without marks they are, of each assistant's
    turn, what follows the prompt for its generation, up to its end token: text after that is never generated. The
    template has to render a conversation's first turns as it does within the whole; else a turn is its content with the
    special token after it, which is found by rendering another content.

    Raises:
        BadInput: there is no template.
    """

    def __init__(self, vocabulary: Subwords, template: str | None = None, file: Path | None = None) -> None:
        self.vocabulary, self.tokenizer = vocabulary, vocabulary.tokenizer
        self._origin = file or f"the chat template of {vocabulary.name}"
        self.template: str | None = template or self.tokenizer.chat_template
        self.has_marks = bool(self.template and GENERATION.search(self.template))
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_tokens, *map(str, added.values())}
        self._special_tokens = [*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def key(self) -> str:
        return f"{self.vocabulary.content()} {self.template!r}"

    def ends(self) -> tuple[int, ...]:
        """The tokenizer's end token, and the special token that ends a turn."""
        tokens = [self.tokenizer.eos_token_id]
        if self.template:
            turns = {"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}
            encoded = self.encode(Conversation("a turn", turns))
            last = int(encoded.tokens[encoded.learned][-1])
            tokens += [last] if self._special.fullmatch(self.tokenizer.decode([last])) else []
        return tuple(dict.fromkeys(token for token in tokens if token is not None))

    def encode(self, conversation: Conversation) -> Encoded:
        if conversation.text is not None:
            return self._tokenize(*self._plain(conversation.text))
        if not self.template:
            expected = "a tokenizer with a chat template; --data.template FILE brings one, --data.text needs none"
            raise BadInput("data.tokenizer", self.vocabulary.name, expected)
        messages = conversation.messages
        if self.has_marks:
            return self._marked(messages, conversation.name)
        text = self._render(messages, conversation.name)
        spans = [
            self._turn(messages, i, text, conversation.name)
            for i, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        return self._tokenize(text, spans)

    def _plain(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """A text between the tokens for the beginning, if the tokenizer puts one, and for the end; the span learned."""
        begin, end = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
        if self.tokenizer("").input_ids[:1] != [self.tokenizer.bos_token_id]:
            begin = ""
        return begin + text + end, [(len(begin), len(begin + text + end))]

    def _marked(self, messages: Sequence[Message], name: str) -> Encoded:
        options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
        options["tokenizer_kwargs"] = {"return_offsets_mapping": True}
        encoded = self._apply(list(messages), name, tokenize=True, **options)
        tokens, places = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        sizes = self._sizes(tokens, self._render(messages, name), places)
        return Encoded(tokens, np.array(encoded["assistant_masks"], bool), sizes)

    def _turn(self, messages: Sequence[Message], number: int, text: str, name: str) -> tuple[int, int]:
        """The characters of `text`, the whole, from where a turn is generated to where it ends."""
        try:
            before = self._render(messages[:number], name, add_generation_prompt=True)
            until = self._render(messages[: number + 1], name)
        except BadInput:  # some templates take no conversation that ends so
            before, until = text, ""
        if until.startswith(before) and text.startswith(until):
            begin, end = len(before), len(until)
        else:
            begin, end = self._placed(messages, number, text, name)
        last_line = messages[number]["content"].strip().rpartition("\n")[2]
        if last_line not in text[begin:end]:
            expected = f"one that shows the contents of turns; that of {name} is not there"
            raise BadInput("data.template", self._origin, expected)
        ends = [m.end() for m in self._special.finditer(text, begin, end)]
        if ends and not text[ends[-1] : end].strip():
            return begin, ends[-1]  # a new line after the end token is never generated
        following = self._special.match(text, end)
        return begin, following.end() if following else end

    def _placed(self, messages: Sequence[Message], number: int, text: str, name: str) -> tuple[int, int]:
        """The characters of a turn's content, where only these change with the content."""
        content = messages[number]["content"]
        other = [*messages]
        other[number] = {**messages[number], "content": SENTINEL}
        before, _, after = self._render(other, name).partition(SENTINEL)
        for part in (content, content.strip()):
            if before + part + after == text and SENTINEL not in after:
                return len(before), len(before) + len(part)
        expected = "one that marks turns by {% generation %}, or renders the first turns as it does within the whole"
        raise BadInput("data.template", self._origin, f"{expected}; not so in {name}")

    def _render(self, messages: Sequence[Message], name: str, **options: Any) -> str:
        return str(self._apply(list(messages), name, tokenize=False, **options))

    def _apply(self, messages: list[Message], name: str, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self.template, **options)
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            expected = f"one that takes all conversations; of {name} it says: {reason(error)}"
            raise BadInput("data.template", self._origin, expected) from None

    def _tokenize(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """Tokens of a text; one is learned if all of its characters are within a span."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        starts, ends = places.T
        learned, cut = np.zeros(len(starts), bool), 0
        for begin, end in spans:
            learned |= (begin <= starts) & (ends <= end) & (starts < end)
            cut += int((((starts < begin) & (begin < ends)) | ((starts < end) & (end < ends))).sum())
        tokens = np.array(encoded["input_ids"], np.int64)
        return Encoded(tokens, learned, self._sizes(tokens, text, places), cut)

    def _sizes(self, tokens: np.ndarray, text: str, places: np.ndarray) -> np.ndarray:
        """Bytes of each of the tokens (n,), from their places (n, 2) in the text.

        A character of several tokens counts with the first.
        """
        ends = np.maximum.accumulate(places[:, 1])
        starts = np.maximum(places[:, 0], np.concatenate([[0], ends[:-1]]))
        before = np.cumsum([0, *(len(_utf8(letter)) for letter in text)])
        return np.where(np.isin(tokens, self._special_tokens), 0, before[np.maximum(ends, starts)] - before[starts])


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
