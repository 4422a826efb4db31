"""Conversations made of rows: prompts with responses, turns of several roles, or plain texts."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from apprentice.errors import BadInput
from datamodules.text.turns import (
    ASSISTANT,
    CALLS,
    READ,
    SYSTEM,
    USER,
    Message,
    Turns,
    read_content,
    read_text,
    read_tools,
    read_turns,
    with_system,
)

OPTIONS = ("prompt", "response", "messages", "text")
TOOLS = "tools"  # the column of the schemas of tools, beside messages
Learn = Literal["all", "last"]
NamedRow = tuple[str, Mapping[str, Any]]  # a name, such as `line 3`, and values by column


class Conversation(NamedTuple):
    """Turns, of which the assistant's after the first `prompted` are learned; or a text that is learned whole."""

    name: str  # where it stands, such as `line 3`
    messages: tuple[Message, ...]
    text: str | None = None
    prompted: int = 0  # messages that are of a column of prompts
    unlearned: frozenset[int] = frozenset()  # places of messages that are not learned, though the assistant's
    tools: tuple[Any, ...] = ()  # schemas of those that the assistant may call
    shape: str = ""  # what columns it was made of
    unread: tuple[str, ...] = ()  # columns that it was not made of

    @property
    def learned(self) -> tuple[int, ...]:
        """The places of the messages that are learned."""
        return tuple(i for i in self.answers if i not in self.unlearned)

    @property
    def answers(self) -> tuple[int, ...]:
        """The places of the assistant's messages that no column of prompts holds."""
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
    def question(self) -> str:
        """The contents of the prompt, as text, but for a system's, which many share."""
        if self.text is not None:
            return self.text
        first = self.learned[0] if self.learned else len(self.messages)
        return "\n".join(message["content"] for message in self.messages[:first] if message["role"] != SYSTEM)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn."""
        if self.text is not None:
            return not self.text.strip()
        return not any(self.messages[i]["content"].strip() or self.messages[i].get(CALLS) for i in self.learned)

    @property
    def lacks_prompt(self) -> bool:
        """Whether the first message is learned: nothing asks for it."""
        return self.learned[:1] == (0,)

    @property
    def keys(self) -> set[str]:
        """Keys of messages that a template may read, or not."""
        return {key for message in self.messages for key in message} - READ


class Columns(NamedTuple):
    """Names of the columns: of prompt and response, of messages, or of plain texts.

    An `addition` follows its prompt, if it is not empty, in a line of its own.
    """

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    text: str | None = None
    addition: str | None = None

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
            is_alpaca = (self.prompt, self.response) == ("instruction", "output") and "input" in names
            return self._replace(addition="input") if is_alpaca else self
        for usual in USUAL:
            if {*filter(None, usual._replace(addition=None))} <= {*names}:
                return usual if usual.addition in names else usual._replace(addition=None)
        expected = f"`data.prompt COLUMN` and `data.response COLUMN` beside it; it has {', '.join(names) or 'none'}"
        raise BadInput(flag, path, expected)

    def describe(self, names: Sequence[str]) -> str:
        """Say what is read of the columns there are."""
        asked = " and ".join(filter(None, (self.prompt, self.addition)))
        main = self.text or self.messages or f"{asked} as prompt, {self.response} as response"
        return ", ".join([main, *self._beside(names)])

    def others(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that are not read."""
        return tuple(name for name in names if name not in {*self, *self._beside(names)})

    def _beside(self, names: Sequence[str]) -> list[str]:
        return [name for name in (SYSTEM, TOOLS) if name in names and self.text is None]


# Columns that are taken where none is named: of OpenAI, ShareGPT, TRL, Alpaca and others.
USUAL = (
    Columns(messages="messages"), Columns(messages="conversations"), Columns(messages="conversation"),
    Columns(prompt="prompt", response="response"), Columns(prompt="prompt", response="completion"),
    Columns(prompt="instruction", response="output", addition="input"), Columns(text="text"),
)  # fmt: skip


def read_conversations(
    rows: Iterable[NamedRow], columns: Columns, path: object, flag: str = "data.path", learn: Learn = "all"
) -> Iterator[Conversation]:
    """Make conversations of the rows of a path, chosen by a flag; the first row tells which columns there are.

    Raises:
        BadInput: there are no rows, a column is missing, or a value is no text and no list of messages.
    """
    chosen: Columns | None = None
    for name, row in rows:
        chosen = chosen or columns.among(list(row), path, flag)
        conversation = _conversation(name, row, chosen)
        if learn == "last":
            conversation = conversation._replace(
                unlearned=frozenset(conversation.learned[:-1]) | conversation.unlearned
            )
        yield conversation._replace(shape=chosen.describe(list(row)), unread=chosen.others(list(row)))
    if chosen is None:
        raise BadInput(flag, path, "a file of conversations; this one is empty")


def _conversation(name: str, row: Mapping[str, Any], columns: Columns) -> Conversation:
    if columns.text is not None:
        return Conversation(name, (), read_text(row.get(columns.text), name, "text"))
    if columns.messages is not None:
        prompted, turns = 0, read_turns(row.get(columns.messages), name, "messages")
    else:
        question, answer = _prompt(name, row, columns), _turns(row.get(str(columns.response)), name, "response")
        prompted = len(question.messages)
        turns = Turns(question.messages + answer.messages, frozenset(prompted + i for i in answer.unlearned))
    messages = with_system(read_content(row.get(SYSTEM), name, "path"), turns.messages)
    shift = len(messages) - len(turns.messages)
    unlearned = frozenset(place + shift for place in turns.unlearned)
    tools = read_tools(row.get(TOOLS), name)
    return Conversation(name, messages, None, prompted and prompted + shift, unlearned, tools)


def _prompt(name: str, row: Mapping[str, Any], columns: Columns) -> Turns:
    asked = _turns(row.get(str(columns.prompt)), name, "prompt")
    addition = read_text(row.get(columns.addition), name, "path") if columns.addition else ""
    if not addition:
        return asked
    return Turns(({"role": USER, "content": f"{asked.messages[0]['content']}\n{addition}"},))


def _turns(value: Any, name: str, option: str) -> Turns:
    """Return the turns of a column of prompts or responses: a text, or a list of messages."""
    if isinstance(value, list):
        return read_turns(value, name, option)
    role = USER if option == "prompt" else ASSISTANT
    return Turns(({"role": role, "content": read_text(value, name, option)},))
