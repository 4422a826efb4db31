"""Conversations to tokens, and which of them are learned: an assistant's turns with the tokens that end them."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from apprentice.errors import BadInput, reason
from datamodules.text.conversations import Conversation
from datamodules.text.marked_turns import MarkedTurns, TokenizedConversation, utf8
from datamodules.text.turns import ASSISTANT, CALLS, KNOWN, Message
from datamodules.text.vocabulary import Subwords, Vocabulary

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
DAY = datetime.date(2024, 7, 26)  # on which all conversations are rendered, so that tokens don't depend on today
SENTINEL = "\u27earesponse\u27eb"  # in place of a content, to see where a template puts it


Span = tuple[int, int]  # the first character, and the one after the last


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
        before = np.cumsum([0, *(len(utf8(letter)) for letter in text)])
        return np.where(np.isin(tokens, self._special_tokens), 0, before[np.maximum(ends, starts)] - before[starts])


def template_of(vocabulary: Vocabulary | Subwords, text: str | None = None, file: Path | None = None) -> Template:
    """Return the built-in template or, of a tokenizer, its own or another one's text, which may be a file's."""
    return ChatTemplate(vocabulary, text, file) if isinstance(vocabulary, Subwords) else MarkedTurns(vocabulary)
