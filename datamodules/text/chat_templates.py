"""Conversations to tokens, and which of them are learned: an assistant's turns with the tokens that end them."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from apprentice.errors import BadInput, reason
from datamodules.text.conversations import Conversation
from datamodules.text.turns import ASSISTANT, CALLS, KNOWN, Message
from datamodules.text.vocabulary import Subwords, Vocabulary

END = "\x03"  # after each turn of the built-in template
MARKS = {"system": "\x01", "user": "\x02", ASSISTANT: "\x04", "tool": "\x05"}  # before a turn, by its role
CONTROL = re.compile(f"[{END}{''.join(MARKS.values())}]")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
DAY = datetime.date(2024, 7, 26)  # on which all conversations are rendered, so that tokens don't depend on today
SENTINEL = "\u27earesponse\u27eb"  # in place of a content, to see where a template puts it


Span = tuple[int, int]  # the first character, and the one after the last


class TokenizedConversation(NamedTuple):
    """The tokens of a conversation."""

    tokens: np.ndarray  # (n,) int64
    learned: np.ndarray  # (n,) bool
    sizes: np.ndarray  # (n,) int64, bytes in UTF-8 of each one's text; 0 of special tokens
    cut: int = 0  # learned ones that cross a border of a response

    def first(self, count: int) -> "TokenizedConversation":
        """Return so many of the first tokens."""
        return TokenizedConversation(self.tokens[:count], self.learned[:count], self.sizes[:count])


class Template(Protocol):
    """What makes tokens of a conversation."""

    def encode(self, conversation: Conversation) -> TokenizedConversation:
        """Tokens of a conversation; BadInput if it does not fit."""

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Tokens (n,) of messages, up to where the assistant's next turn begins; BadInput if they don't fit."""

    def key(self) -> str:
        """What determines the tokens."""

    def plain(self) -> str | None:
        """What `template_of` makes it of."""

    def ends(self) -> tuple[int, ...]:
        """Tokens that end a response; BadInput if no turn can be learned."""

    def ends_of_texts(self) -> tuple[int, ...]:
        """Tokens that end a plain text."""

    def ends_turns(self) -> bool:
        """Whether a response's last token ends it; else a net does not learn where to stop."""

    def reads(self, key: str) -> bool:
        """Whether it may read this key of a message."""


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
        letters = [1] * len(_utf8(piece)) if is_bytes else [len(_utf8(letter)) for letter in piece]
        return np.array([*letters[:-1], 0], np.int64)


class ChatTemplate:
    """A chat template of a Hugging Face tokenizer: its own, or the text of another one.

    Learned tokens are those that the template marks by `{% generation %}`. Without marks they are, of each assistant's
    turn, what follows the prompt for its generation, up to its end token: text after that is never generated. The
    template has to render a conversation's first turns as it does within the whole; else a turn is its content with the
    special token after it, which is found by rendering another content. What a template writes of today is that of DAY.

    Raises:
        BadInput: there are several templates and none is `default`, or one writes of today in a format that it
            computes. When a conversation is encoded: there is no template, or it does not fit.
    """

    def __init__(self, vocabulary: Subwords, template: str | None = None, file: Path | None = None) -> None:
        self.vocabulary, self.tokenizer, self._text = vocabulary, vocabulary.tokenizer, template
        self._origin = file or f"the chat template of {vocabulary.name}"
        self.template = self._on_one_day(template or self._default())
        self.has_marks = bool(self.template and GENERATION.search(self.template))
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_tokens, *map(str, added.values())}
        self._special_tokens = [*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _default(self) -> str | None:
        """The tokenizer's template; of several the one that is called so."""
        templates = self.tokenizer.chat_template
        if isinstance(templates, dict) and "default" not in templates:
            expected = f"a tokenizer with one chat template, or one called default; it has {', '.join(templates)}"
            raise BadInput("data.tokenizer", self.vocabulary.name, f"{expected}. `data.template FILE` brings one")
        template: str | None = templates["default"] if isinstance(templates, dict) else templates
        return template

    def _on_one_day(self, template: str | None) -> str | None:
        """A template in which the date of today is that of DAY."""
        dated = NOW.sub(lambda call: repr(DAY.strftime(call[2])), template or "")
        if "strftime_now(" in dated.replace(" ", ""):
            raise self._refusal("one that writes today's date by strftime_now of a text, so that it can be fixed")
        return dated or None

    def _refusal(self, expected: str) -> BadInput:
        return BadInput("data.template", self._origin, expected)

    def key(self) -> str:
        return f"{self.vocabulary.content()} {self.template!r}"

    def plain(self) -> str | None:
        return self._text

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        conversation = Conversation("the conversation", tuple(messages))
        self._check(conversation)
        return self._tokenize(self._render(conversation, add_generation_prompt=True), [], conversation.name).tokens

    def ends(self) -> tuple[int, ...]:
        """The tokenizer's end token, and the special token that ends a turn."""
        return tuple(dict.fromkeys([*self.ends_of_texts(), *self._ends_of_turns()]))

    def ends_turns(self) -> bool:
        return bool(self._ends_of_turns())

    def reads(self, key: str) -> bool:
        return re.search(rf"\b{re.escape(key)}\b", self.template or "") is not None

    def _ends_of_turns(self) -> list[int]:
        """The special token that ends a turn, if there is one."""
        if not self.template:
            return []
        turns = {"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}
        encoded = self.encode(Conversation("a turn", turns))
        if not encoded.learned.any() and not encoded.cut:
            raise self._refusal("one that marks the assistant's turns by {% generation %}; it marks nothing of a turn")
        last = [int(token) for token in encoded.tokens[encoded.learned][-1:]]  # none where all of it crosses a border
        return last if self._special.fullmatch(self.tokenizer.decode(last)) else []

    def ends_of_texts(self) -> tuple[int, ...]:
        """The tokenizer's end token, if it has one."""
        end = self.tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def encode(self, conversation: Conversation) -> TokenizedConversation:
        if conversation.text is not None:
            return self._tokenize(*self._plain(conversation.text), conversation.name)
        self._check(conversation)
        if self.has_marks:
            text, spans = self._marked_turns(conversation)
        else:
            text = self._render(conversation)
            spans = [self._turn(conversation, i, text) for i in conversation.learned]
        return self._tokenize(text, spans, conversation.name)

    def _check(self, conversation: Conversation) -> None:
        """Raise BadInput for messages that the template does not take."""
        if not self.template:
            expected = "a tokenizer with a chat template; `data.template FILE` brings one, `data.text` needs none"
            raise BadInput("data.tokenizer", self.vocabulary.name, expected)
        for role in {message["role"] for message in conversation.messages} - {*KNOWN}:
            if not self.reads(role):
                expected = f"a role that the template knows, such as {', '.join(KNOWN)}, in {conversation.name}"
                raise BadInput("data.messages", role, expected)
        if conversation.tools and not self.reads("tools"):
            raise self._refusal(f"one that writes tools, which {conversation.name} has")

    def _plain(self, text: str) -> tuple[str, list[Span]]:
        """A text between the tokens for the beginning, if the tokenizer puts one, and for the end; the span learned."""
        begin, end = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
        if self.tokenizer("").input_ids[:1] != [self.tokenizer.bos_token_id]:
            begin = ""
        return begin + text + end, [(len(begin), len(begin + text + end))]

    def _marked_turns(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """A conversation, and the characters of it between marks, but for those of turns that are not learned."""
        text, spans = self._mark_responses(conversation)
        if conversation.prompted:
            spans = spans[len(self._mark_responses(conversation, conversation.prompted)[1]) :]
        if not conversation.unlearned:
            return text, spans
        if len(spans) != len(conversation.answers):
            raise self._refusal(
                f"one with a mark for each of the assistant's turns, of which {conversation.name} learns some"
            )
        turns = zip(conversation.answers, spans, strict=True)
        return text, [span for turn, span in turns if turn not in conversation.unlearned]

    def _mark_responses(self, conversation: Conversation, count: int | None = None) -> tuple[str, list[Span]]:
        """A conversation's first messages, and the characters of them between marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = dict[str, Any](chat_template=self.template, return_assistant_tokens_mask=True)
        options["tools"] = list(conversation.tools) or None
        try:
            texts, spans = render_jinja_template(
                [list(conversation.messages[:count])], **options, **self.tokenizer.special_tokens_map
            )
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            raise self._refuses(conversation.name, error) from None
        return texts[0], [(begin, end) for begin, end in spans[0] if begin < end]

    def _turn(self, conversation: Conversation, number: int, text: str) -> Span:
        """The characters of `text`, the whole, from where a turn is generated to where it ends."""
        message = conversation.messages[number]
        try:
            before = self._render(conversation, number, add_generation_prompt=True)
            until = self._render(conversation, number + 1)
        except BadInput:  # some templates take no conversation that ends so
            before, until = text, ""
        if until.startswith(before) and text.startswith(until):
            begin, end = len(before), len(until)
        else:
            begin, end = self._find_response(conversation, number, text)
        last_line = message["content"].strip().rpartition("\n")[2]
        if last_line not in text[begin:end] or (CALLS in message and not self.reads(CALLS)):
            expected = f"one that shows the contents of turns; that of {conversation.name} is not there"
            raise self._refusal(expected)
        ends = [m.end() for m in self._special.finditer(text, begin, end)]
        if ends and not text[ends[-1] : end].strip():
            return begin, ends[-1]  # a new line after the end token is never generated
        following = self._special.match(text, end)
        return begin, following.end() if following else end

    def _find_response(self, conversation: Conversation, number: int, text: str) -> Span:
        """The characters of a turn's content, where only these change with the content."""
        message = conversation.messages[number]
        content, other = message["content"], [*conversation.messages]
        other[number] = {**message, "content": SENTINEL}
        before, _, after = self._render(conversation._replace(messages=tuple(other))).partition(SENTINEL)
        for part in (content, content.strip()):
            if before + part + after == text and SENTINEL not in after and CALLS not in message:
                return len(before), len(before) + len(part)
        expected = "one that marks turns by {% generation %}, or renders the first turns as it does within the whole"
        raise self._refusal(f"{expected}; not so in {conversation.name}")

    def _render(self, conversation: Conversation, count: int | None = None, **options: Any) -> str:
        """The text of a conversation's first messages, or of all."""
        options |= {"chat_template": self.template, "tokenize": False, "tools": list(conversation.tools) or None}
        try:
            return str(self.tokenizer.apply_chat_template(list(conversation.messages[:count]), **options))
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            raise self._refuses(conversation.name, error) from None

    def _refuses(self, name: str, error: Exception) -> BadInput:
        return self._refusal(f"one that takes the data's conversations; of {name} it says: {reason(error)}")

    def _tokenize(self, text: str, spans: Sequence[Span], name: str) -> TokenizedConversation:
        """Tokens of a text; one is learned if all of its characters are within a span."""
        try:
            text.encode()  # a half of a surrogate pair has no bytes
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            places = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer's own code raises
            expected = f"a fast one, which takes the text of {name} and says where its tokens stand: {reason(error)}"
            raise BadInput("data.tokenizer", self.vocabulary.name, expected) from None
        starts, ends = places.T
        learned, cut = np.zeros(len(starts), bool), 0
        for begin, end in spans:
            learned |= (begin <= starts) & (ends <= end) & (starts < end)
            cut += int((((starts < begin) & (begin < ends)) | ((starts < end) & (end < ends))).sum())
        tokens = np.array(encoded["input_ids"], np.int64)
        self.vocabulary.check_rows(tokens, "data.path")
        return TokenizedConversation(tokens, learned, self._sizes(tokens, text, places), cut)

    def _sizes(self, tokens: np.ndarray, text: str, places: np.ndarray) -> np.ndarray:
        """Bytes of each of the tokens (n,), from their places (n, 2) in the text.

        A character of several tokens counts with the first.
        """
        ends = np.maximum.accumulate(places[:, 1])
        starts = np.maximum(places[:, 0], np.concatenate([[0], ends[:-1]]))
        before = np.cumsum([0, *(len(_utf8(letter)) for letter in text)])
        return np.where(np.isin(tokens, self._special_tokens), 0, before[np.maximum(ends, starts)] - before[starts])


def template_of(vocabulary: Vocabulary | Subwords, text: str | None = None, file: Path | None = None) -> Template:
    """Return the built-in template or, of a tokenizer, its own or another one's text, which may be a file's."""
    return ChatTemplate(vocabulary, text, file) if isinstance(vocabulary, Subwords) else MarkedTurns(vocabulary)


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
