"""A chat in a terminal, or from a pipe, with trained language models, each in its own conversation."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from typing import ClassVar
from unicodedata import category

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.text.marked_turns import CONTROL, MarkedTurns
from datamodules.text.turns import ASSISTANT, USER, Message
from deploy.net_path import net_path
from harness import cli
from harness.runs import signals
from harness.runs.options import OneSeedOptions
from harness.runs.progress import is_live
from harness.studies.text.language_model import TrainedLM, load_trained, turn_of
from lit_modules.nets.generation import Sampling, longest_text, row_keys

RESET, QUIT = "/reset", "/quit"
PROMPT = "> "  # on a terminal


@dataclass
class Options(OneSeedOptions):
    """Options of a chat."""

    run: list[str] | None = None
    """folders of nets, such as RUN/seed0/kd, of runs of gpt.py, or of models of transformers."""
    temperature: float = 0.8
    """divides the logits; 0 takes the likeliest token."""
    seed: int = cli.option(0, cli.Limit(lambda seed: seed >= 0, "0 or more"))
    """of the draws."""
    max_tokens: int = cli.option(256, cli.COUNT)
    """tokens of an answer at most."""
    raw: bool = False
    """continue one text, to which each line is added, without a chat template."""
    why_one: ClassVar[str] = "draws are those of `seed`"
    why_inexact: ClassVar[str] = "models answer on one device"
    idle: ClassVar[tuple[str, ...]] = (
        "seeds", "out", "resume", "overwrite", "checkpoint_every", "num_classes",
    )  # fmt: skip


class Conversation:
    """The conversation with one model, as messages or, if `raw`, as one text."""

    def __init__(self, model: TrainedLM, config: Namespace) -> None:
        self.model, self.config = model, config
        self.messages: list[Message] = []

    def answer(self, line: str) -> str:
        """Return the answer to a line, which then belongs to the conversation, with a remark if it is cut.

        A line for which the context has no room does not belong to it. BadInput for one that can't be asked.
        """
        model, config = self.model, self.config
        messages = [*self.messages, {"role": USER, "content": line}]
        prompt = self._encode(messages)
        if (room := model.room(prompt)) < 1:
            needed = f"with this line the conversation has {len(prompt)}; {RESET} begins anew"
            return f"(the context of {longest_text(model.net)} tokens is full: {needed})"
        keys = row_keys(torch.zeros(1, dtype=torch.int64), config.seed, turn_of(messages))
        sampling = Sampling(config.temperature)
        (written,) = model.write(prompt, keys, sampling, config.max_tokens, config.raw)
        text = CONTROL.sub("", written.text) if isinstance(model.template, MarkedTurns) else written.text
        self.messages = [*messages, {"role": ASSISTANT, "content": text}]
        if len(written.tokens) == room and not written.is_whole:
            return f"{text}\n(cut: the context of {longest_text(model.net)} tokens is full; {RESET} begins anew)"
        if written.is_whole or config.raw:
            return text
        return f"{text}\n(cut: {config.max_tokens} tokens, as `max_tokens` says)"

    def _encode(self, messages: list[Message]) -> Tensor:
        """Return the tokens (t,) of what the model continues."""
        if not self.config.raw:
            return self.model.encode(messages, "")
        parts = [f"\n{said['content']}" if said["role"] == USER else str(said["content"]) for said in messages]
        return self.model.vocabulary.encode("".join(parts).removeprefix("\n"), "")


def chat(config: Namespace) -> None:
    """Answer the lines of stdin until it ends.

    Raises:
        BadInput: there is no such model, or it has learned no chats.
    """
    if not config.run:
        raise BadInput("run", "(nothing)", "folders of nets, as RUN/seed0/kd")
    if len({*config.run}) < len(config.run):
        raise BadInput("run", " ".join(config.run), "each folder once")
    Sampling(config.temperature)
    models = {name: _load(folder, config.raw) for name, folder in _names(config.run).items()}
    if sys.stdout.isatty():
        print(f"{', '.join(models)}: {RESET} begins anew, {QUIT} or Ctrl-D ends")
    with signals.advise_at_stop("\n"):
        conversations = _begin(models, config)
        for line in _lines():
            if line == QUIT:
                break
            if line == RESET:
                conversations = _begin(models, config)
                print("the conversation begins anew")
            elif line.startswith("/") and line[1:].isalpha():
                print(f"{line}: no command; there are {RESET} and {QUIT}")
            elif line:
                show({name: _answer(conversation, line) for name, conversation in conversations.items()})


def _names(folders: list[str]) -> dict[str, str]:
    """Return folders by the names of their nets or, if two are the same, by themselves."""
    names = [net_path(folder).name for folder in folders]
    return dict(zip(names if len({*names}) == len(names) else folders, folders, strict=True))


def _load(folder: str, raw: bool) -> TrainedLM:
    model = load_trained(folder)
    if model.template is None and not raw:
        expected = (
            "a model whose vocabulary.json has the template of its chats; `resume true` writes it into an older run"
        )
        raise BadInput("run", folder, f"{expected}; `raw true` continues a text by this one")
    return model


def _begin(models: Mapping[str, TrainedLM], config: Namespace) -> dict[str, Conversation]:
    return {name: Conversation(model, config) for name, model in models.items()}


def _lines() -> Iterator[str]:
    """Yield the lines of stdin without their ends; a terminal shows that it is asked."""
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, TextIOWrapper):  # or some locales let bytes that are no text pass
        sys.stdin.reconfigure(errors="strict")
    while True:
        if is_asked:
            sys.stdout.write(PROMPT)
        sys.stdout.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise BadInput("", "stdin", f"text in UTF-8; {error}") from None
        if not line:
            if is_asked:
                print()
            return
        yield line.strip()


def _answer(conversation: Conversation, line: str) -> str:
    try:
        return conversation.answer(line)
    except BadInput as fault:
        return f"({fault})"


def show(answers: Mapping[str, str]) -> None:
    """Print answers by name: of several, in columns on a terminal, else one below the other."""
    texts = {name: printable(text) for name, text in answers.items()}
    if len(texts) > 1 and is_live():
        table = Table(*(Column(Text(name)) for name in texts))
        table.add_row(*map(Text, texts.values()))
        Console(highlight=False).print(table)
    else:
        for name, text in texts.items():
            print(f"{name}: {text}" if len(texts) > 1 else text)


def printable(text: str) -> str:
    """Return a text without characters that would steer a terminal."""
    kept = "\n\t\u200c\u200d"  # joiners are a part of words and emoji
    return "".join(x if x.isprintable() or x in kept or category(x) == "Zs" else "\ufffd" for x in text)
