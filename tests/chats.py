"""Conversations for tests, and data modules of them."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datamodules import Chat

TEXT = "a bird can fly over the old stone wall near our river and sing till late in the warm night"
WORDS = TEXT.split()


def rows(count: int, longest: int = 12) -> list[dict[str, str]]:
    """Prompts and responses of 1 to `longest` words."""
    return [
        {"prompt": f"{i} {WORDS[i % len(WORDS)]}?", "response": " ".join((WORDS * 9)[i : i + 1 + i * 7 % longest])}
        for i in range(count)
    ]


def chats(count: int, turns: int = 3) -> list[dict[str, Any]]:
    """Chats of one to `turns` questions with their answers, each with a first question of its own."""
    return [{"messages": [*chain(*(_turn(i, turn) for turn in range(1 + i % turns)))]} for i in range(count)]


def _turn(chat: int, turn: int) -> list[dict[str, str]]:
    asks, says = f"{chat} and {turn}?", f"it is {chat}"
    return [{"role": "user", "content": asks}, {"role": "assistant", "content": says}]


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chat(folder: Path, count: int = 40, longest: int = 12, **options: Any) -> Chat:
    """A set of `count` conversations in bytes, of which 4 validate and 4 test."""
    path = write_lines(folder / "chat.jsonl", rows(count, longest))
    data = Chat(path, **{"validation_size": 4, "test_size": 4, "batch_size": 5, "max_length": 512} | options)
    data.setup()
    return data
