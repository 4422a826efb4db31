"""Conversations made of rows: prompts with responses, turns of several roles, or plain texts."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apprentice.errors import BadInput

ASSISTANT, USER = "assistant", "user"
USUAL = (("messages",), ("prompt", "response"), ("text",))  # columns that are taken where none is named
OPTIONS = ("prompt", "response", "messages", "text")

Message = Mapping[str, Any]  # its role and content, and what else a template may read
NamedRow = tuple[str, Mapping[str, Any]]  # a name, such as `line 3`, and values by column


class Conversation(NamedTuple):
    """Turns, of which the assistant's after the first `prompted` are learned; or a text that is learned whole."""

    name: str  # where it stands, such as `line 3`
    messages: tuple[Message, ...]
    text: str | None = None
    prompted: int = 0  # messages that are of a column of prompts

    @property
    def learned(self) -> tuple[int, ...]:
        """The places of the messages that are learned."""
        turns = enumerate(self.messages)
        return tuple(i for i, message in turns if i >= self.prompted and message["role"] == ASSISTANT)

    @property
    def prompt(self) -> str:
        """What comes before the first turn that is learned, or the text: parts of a data set share none."""
        if self.text is not None:
            return self.text
        first = self.learned[0] if self.learned else len(self.messages)
        return json.dumps(self.messages[:first], default=str)

    @property
    def response(self) -> str:
        """What is learned, as text."""
        if self.text is not None:
            return self.text
        return "".join(self.messages[i]["content"] or "" for i in self.learned)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn."""
        return not self.response.strip()

    @property
    def lacks_prompt(self) -> bool:
        """Whether the first message is learned: nothing asks for it."""
        return self.learned[:1] == (0,)


class Columns(NamedTuple):
    """Names of the columns: of prompt and response, of messages, or of plain texts."""

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    text: str | None = None

    def check(self) -> None:
        """Raise BadInput for columns of two kinds, or a prompt without a response."""
        named = [option for option in OPTIONS if getattr(self, option) is not None]
        if named and named not in (["prompt", "response"], ["messages"], ["text"]):
            expected = "`data.prompt` and `data.response`, or `data.messages`, or `data.text` alone"
            raise BadInput(f"data.{named[0]}", getattr(self, named[0]), expected)

    def among(self, names: Sequence[str], path: object, flag: str = "data.path") -> "Columns":
        """Return the columns to read of those there are; BadInput if one is missing, or none is a usual one."""
        for option in OPTIONS:
            if (column := getattr(self, option)) is not None and column not in names:
                raise BadInput(f"data.{option}", column, f"a column of {path}: {', '.join(names) or 'it has none'}")
        if any(self):
            return self
        for usual in USUAL:
            if set(usual) <= {*names}:
                return Columns(**{option: option for option in usual})
        expected = f"`data.prompt COLUMN` and `data.response COLUMN` beside it; it has {', '.join(names) or 'none'}"
        raise BadInput(flag, path, expected)


def read_conversations(
    rows: Iterable[NamedRow], columns: Columns, path: object, flag: str = "data.path"
) -> Iterator[Conversation]:
    """Make conversations of the rows of a path, chosen by a flag; the first row tells which columns there are.

    Raises:
        BadInput: there are no rows, a column is missing, or a value is no text and no list of messages.
    """
    chosen: Columns | None = None
    for name, row in rows:
        chosen = chosen or columns.among(list(row), path, flag)
        yield _conversation(name, row, chosen)
    if chosen is None:
        raise BadInput(flag, path, "a file of conversations; this one is empty")


def _conversation(name: str, row: Mapping[str, Any], columns: Columns) -> Conversation:
    if columns.text is not None:
        return Conversation(name, (), _text(row.get(columns.text), name, "text"))
    if columns.messages is not None:
        return Conversation(name, _messages(row.get(columns.messages), name, "messages"))
    turns, prompted = list[Message](), 0
    for option, column, role in (("prompt", columns.prompt, USER), ("response", columns.response, ASSISTANT)):
        value, prompted = row.get(str(column)), len(turns)
        is_list = isinstance(value, list)
        turns += _messages(value, name, option) if is_list else [{"role": role, "content": _text(value, name, option)}]
    return Conversation(name, tuple(turns), prompted=prompted)


def _messages(value: Any, name: str, option: str) -> tuple[Message, ...]:
    """Turns as templates take them: contents that are lists of texts become one text."""
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise BadInput(f"data.{option}", name, "a list of messages, each with a role and a content")
    return tuple({**message, "content": _content(message.get("content"), name, option)} for message in value)


def _content(value: Any, name: str, option: str) -> str:
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text")) for part in value)
    return _text(value, name, option)


def _text(value: Any, name: str, option: str) -> str:
    """A text; "" of nothing, which leaves the conversation out later."""
    if value is not None and not isinstance(value, str):
        raise BadInput(f"data.{option}", name, f"a text there; it is a {type(value).__name__}")
    return value or ""
