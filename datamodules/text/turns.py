"""Turns of a conversation as templates take them, from the shapes that people's files have."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from apprentice.errors import BadInput

ASSISTANT, USER, SYSTEM, TOOL = "assistant", "user", "system", "tool"
Message = Mapping[str, Any]  # its role and content, and what else a template may read
# Names of roles in ShareGPT's files, Gemma's templates and others', in small letters.
ROLES = {
    "human": USER, "gpt": ASSISTANT, "model": ASSISTANT, "bot": ASSISTANT, "chatgpt": ASSISTANT,
    "observation": TOOL, "function_response": TOOL, "function_call": ASSISTANT,
}  # fmt: skip
KNOWN = SYSTEM, USER, ASSISTANT, TOOL
# Keys that say whether a turn is learned: OpenAI's, LLaMA-Factory's, axolotl's.
MARKS = "weight", "loss", "train", "training"
CALLS = "tool_calls"
READ = {"role", "content", *MARKS}  # keys of a message that are read whatever the template


class Turns(NamedTuple):
    """Messages, and the places of those that their file does not want to be learned."""

    messages: tuple[Message, ...]
    unlearned: frozenset[int] = frozenset()


def read_turns(value: Any, name: str, option: str) -> Turns:
    """Read a list of messages: `role` and `content`, or `from` and `value`, with the roles of any of `ROLES`.

    Contents that are lists of texts become one text, and arguments of tool calls that are JSON what it says. What is
    null is left out, as Arrow writes it where another message has a value.

    Raises:
        BadInput: it is no such list; `option` of the row called `name` is blamed.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise _no_messages(name, option)
    messages = [_read_message(message, name, option) for message in value]
    muted = {place for place, message in enumerate(messages) if not _is_learned(message, name, option)}
    return Turns(tuple(_without_marks(message) for message in messages), frozenset(muted))


def _no_messages(name: str, option: str) -> BadInput:
    return BadInput(f"data.{option}", name, "a list of messages, each with a role and a content")


def _read_message(raw: Mapping[str, Any], name: str, option: str) -> dict[str, Any]:
    """Return a message by the names that templates use."""
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        message["content"] = message.pop("value", None)
    written = message.get("role")
    if not isinstance(written, str):
        raise _no_messages(name, option)
    role = written.lower()
    message["role"] = ROLES.get(role, role if role in KNOWN else written)
    if role == "function_call" and CALLS not in message:
        message[CALLS] = [{"type": "function", "function": _parse(message.pop("content", None), name, option)}]
    message["content"] = read_content(message.get("content"), name, option)
    if CALLS in message:
        message[CALLS] = [_read_call(call, name, option) for call in _listed(message[CALLS], name, option)]
        if not message[CALLS]:
            del message[CALLS]
    return message


def _is_learned(message: Mapping[str, Any], name: str, option: str) -> bool:
    marks = [message[key] for key in MARKS if key in message]
    for mark in marks:
        if not isinstance(mark, bool | int | float) or mark not in {0, 1}:
            raise BadInput(f"data.{option}", name, f"0 or 1, true or false, for {' or '.join(MARKS)}; it is {mark!r}")
    return all(marks)


def _without_marks(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in message.items() if key not in MARKS}


def _read_call(call: Any, name: str, option: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, not its JSON, which a template would write as a text."""
    if not isinstance(call, dict):
        raise BadInput(f"data.{option}", name, f"tool calls that are objects; one is a {type(call).__name__}")
    inner = call.get("function", call)
    if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
        inner = {**inner, "arguments": _parse(inner["arguments"], name, option)}
    return {**call, "function": inner} if "function" in call else inner


def _parse(value: Any, name: str, option: str) -> Any:
    """Return what JSON says; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadInput(f"data.{option}", name, f"JSON in its tool call; it is none: {error}") from None


def _listed(value: Any, name: str, option: str) -> list[Any]:
    value = _parse(value, name, option)
    if not isinstance(value, list):
        raise BadInput(f"data.{option}", name, f"a list of tool calls; it is a {type(value).__name__}")
    return value


def read_tools(value: Any, name: str) -> tuple[Any, ...]:
    """Read a column of tools: a list of their schemas, or its JSON; () for none."""
    if not value:
        return ()
    tools = _parse(value, name, "path")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInput("data.path", name, "a list of schemas, or its JSON, as its `tools`")
    return tuple(tools)


def read_content(value: Any, name: str, option: str) -> str:
    """Return a content as one text."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text")) for part in value)
    return read_text(value, name, option)


def read_text(value: Any, name: str, option: str) -> str:
    """Return a text; "" of nothing, which leaves the conversation out later."""
    if value is not None and not isinstance(value, str):
        raise BadInput(f"data.{option}", name, f"a text there; it is a {type(value).__name__}")
    return value or ""


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects that are null: those that Arrow fills in for other rows' keys."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def with_system(text: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages that begin with a system's, unless the text is empty or they do already."""
    if not text or (messages and messages[0]["role"] == SYSTEM):
        return tuple(messages)
    return ({"role": SYSTEM, "content": text}, *messages)
