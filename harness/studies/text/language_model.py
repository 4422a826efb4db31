"""What a trained language model writes: after a text or, by the template of its chats, as the assistant."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.text.chat_templates import Template, template_of
from datamodules.text.conversation_files import CONVERSATIONS, File, open_sources
from datamodules.text.conversations import Columns, read_conversations
from datamodules.text.turns import ASSISTANT, USER, Message, read_turns
from datamodules.text.vocabulary import Subwords, Vocabulary
from harness.reports.results import load_results
from harness.runs.nets import load_net, read_facts
from harness.studies.text.vocabularies import read_vocabulary
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.generation import Sampling, generate, longest_text, row_keys
from lit_modules.nets.hugging_face import HuggingFaceLM

WRITTEN = 128  # tokens at most that a model of others writes after a prompt
NAME = "gpt"  # of the experiment, of its fit and of the net's folder


class Written(NamedTuple):
    """What a model has written after a prompt."""

    tokens: Tensor  # (t,)
    text: str  # without the token that ends a response
    is_whole: bool  # whether there is such a token


@dataclass(frozen=True)
class TrainedLM:
    """A trained language model with what its tokens stand for.

    Args:
        net: tokens to logits.
        vocabulary: of its tokens.
        template: of the chats that it has learned; None for plain texts.
        ends: tokens that end a response.
        block_size: tokens of a text to which it writes unless asked for others, such as it was trained on; or None.
    """

    net: Any
    vocabulary: Vocabulary | Subwords
    template: Template | None
    ends: tuple[int, ...]
    block_size: int | None

    def encode(self, messages: Sequence[Message], flag: str) -> Tensor:
        """Return the tokens (t,) of messages, up to where the assistant's next turn begins."""
        assert self.template is not None, "messages need a template"
        try:
            return torch.from_numpy(self.template.prompt(messages))
        except BadInput as fault:  # which blames the data
            value = fault.value if fault.argument == "data.messages" else repr(messages[-1]["content"])
            raise BadInput(flag, value, fault.expected) from None

    def room(self, prompt: Tensor) -> int:
        """Return how many tokens may follow a prompt (t,)."""
        longest = longest_text(self.net)
        return sys.maxsize if longest is None else longest - len(prompt)

    def write(self, prompt: Tensor, keys: Tensor, sampling: Sampling, new: int, raw: bool = False) -> list[Written]:
        """Continue a prompt (t,) by each of the keys (n,) of `generate`, by `new` tokens at most.

        It ends as a response does or, if `raw`, as a plain text.
        """
        end = self.vocabulary.tokenizer.eos_token_id if isinstance(self.vocabulary, Subwords) else None
        ends = self.ends if not raw else () if end is None else (end,)
        lengths, new = torch.full_like(keys, len(prompt)), min(new, self.room(prompt))
        with any_kernel(self.net):  # on the CPU, wherever the net was trained
            drawn = generate(self.net, prompt.expand(len(keys), -1), lengths, new, keys, sampling, ends)
        rows = zip(drawn.tokens, drawn.lengths.tolist(), strict=True)
        return [self._written(tokens[:length], ends) for tokens, length in rows]

    def _written(self, tokens: Tensor, ends: Sequence[int]) -> Written:
        is_whole = len(tokens) > 0 and int(tokens[-1]) in ends
        return Written(tokens, self.vocabulary.decode(tokens[:-1] if is_whole else tokens), is_whole)

    def continue_text(self, text: str, config: Namespace) -> list[str]:
        """Return a text with what follows it, `samples` times."""
        prompt = self.vocabulary.encode(text, "sample")
        new = self._check(prompt, repr(text), config.sample_tokens, 0)
        keys = row_keys(torch.arange(config.samples), config.sample_seed)
        written = self.write(prompt, keys, Sampling(config.temperature, config.top_k), new, raw=True)
        return [self.vocabulary.decode(torch.cat([prompt, tokens])) for tokens, *_ in written]

    def answer(self, messages: Sequence[Message], number: int, config: Namespace) -> list[str]:
        """Return what the assistant says to the messages of chat `number`, `samples` times."""
        prompt, samples = self.encode(messages, "sample"), torch.arange(config.samples) + number * config.samples
        new = self._check(prompt, repr(messages[-1]["content"]), config.sample_tokens, 1)
        keys = row_keys(samples, config.sample_seed, turn_of(messages))
        return [written.text for written in self.write(prompt, keys, Sampling(config.temperature, config.top_k), new)]

    def _check(self, prompt: Tensor, shown: str, new: int | None, least: int) -> int:
        """Return how many tokens to write: `new`, by default to a text of `block_size` or, without one, WRITTEN.

        Raises:
            BadInput: the prompt (t,) is empty, or leaves no room for the `least` that is to be written.
        """
        longest = longest_text(self.net)
        if new is not None and longest is not None and new > longest - len(prompt) >= least:
            expected = f"at most {longest - len(prompt)}, for which the net's block has room after the prompt"
            raise BadInput("sample_tokens", new, expected)
        if new is None and self.block_size is not None:
            new, longest = max(self.block_size - len(prompt), 0), self.block_size
        most = (longest or sys.maxsize) - least
        if not 1 <= len(prompt) <= most:
            raise BadInput(
                "sample", shown, f"1 to {most} tokens, the net's block size{' less one' * least}; not {len(prompt)}"
            )
        return WRITTEN if new is None else new


def turn_of(messages: Sequence[Message]) -> int:
    """Return the number of the assistant's next turn, by which it is drawn."""
    return sum(message["role"] == ASSISTANT for message in messages)


def load_trained(run: str) -> TrainedLM:
    """Load what `run` names; BadInput if it can't be used.

    It is a run of gpt.py, whose first seed's net is taken, a net's folder as RUN/seed0/kd, or the folder of a model of
    transformers.
    """
    folder = Path(run)
    if (folder / "net.yaml").is_file():
        return _load_net(folder)
    if (folder / "config.json").is_file():
        return _load_of_transformers(run)
    results = load_results(run)
    if results["experiment"] != NAME:
        of_kd = f"; or one of its nets' folders, as {folder}/seed0/kd" if results["experiment"] == "kd" else ""
        raise BadInput("run", run, f"a run of gpt.py; this one is of {results['experiment']}.py{of_kd}")
    return _load_net(folder / f"seed{results['seeds'][0]}" / NAME)


def _load_net(folder: Path) -> TrainedLM:
    facts = read_facts(folder)
    if facts is not None and facts.task != "tokens":
        raise BadInput("run", folder, f"a language model; the task of this net is {facts.task}")
    net: Any = load_net(folder)
    vocabulary, template = read_vocabulary(folder)
    ends = template.ends() if template else ()
    return TrainedLM(net, vocabulary, template, ends, net.init_args.get("block_size"))


def _load_of_transformers(run: str) -> TrainedLM:
    try:
        vocabulary = Subwords(run)
        net = HuggingFaceLM(run, len(vocabulary), 1, pretrained=True).eval()
        template = template_of(vocabulary) if vocabulary.tokenizer.chat_template else None
        ends = template.ends() if template else ()
    except BadInput as fault:
        raise BadInput("run", run, fault.expected) from None
    more = net.model.generation_config.eos_token_id  # of bytes, whose tokenizer has no special tokens
    ends += () if more is None else tuple(more) if isinstance(more, list) else (more,)
    return TrainedLM(net, vocabulary, template, tuple(dict.fromkeys(ends)), None)


def write_samples(folder: Path, prompt: str, config: Namespace) -> list[str]:
    """Continue a text by the net in a folder."""
    return _load_net(folder).continue_text(prompt, config)


def sample(config: Namespace) -> list[str]:
    """Continue `sample` by the model in `run`, or answer it, as the assistant, where it has learned chats."""
    model = load_trained(config.run)
    if model.template is not None and not config.raw:
        chats = enumerate(_read_asked(config.sample))
        return [text for number, messages in chats for text in model.answer(messages, number, config)]
    if not config.raw and (_is_messages(config.sample) or _is_file(config.sample)):
        raise BadInput("sample", config.sample, "a text: this model has learned no chats; or `raw true`")
    return model.continue_text(config.sample, config)


def _is_messages(text: str) -> bool:
    return "".join(text[:99].split()).startswith("[{")


def _is_file(text: str) -> bool:
    return text.endswith(tuple(CONVERSATIONS.endings)) and os.path.isfile(text)  # noqa: PTH113 - a text may be no path


def _read_asked(text: str) -> Iterator[Sequence[Message]]:
    """Yield messages to answer: those of a list in JSON, of each chat in a file without its last answer, or a text.

    Raises:
        BadInput: there is nothing to answer.
    """
    if _is_file(text):
        yield from _read_file(text)
        return
    if not _is_messages(text):
        yield ({"role": USER, "content": text},)
        return
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput("sample", text, f"JSON, as it begins like a list of messages; {error}") from None
    try:
        messages = read_turns(value, text, "messages").messages
    except BadInput as fault:
        raise BadInput("sample", text, fault.expected) from None
    if messages[-1]["role"] == ASSISTANT:
        raise BadInput("sample", text, "messages of which the last is not the assistant's")
    yield messages


def _read_file(path: str) -> Iterator[Sequence[Message]]:
    source = open_sources(path, None)[0]
    assert isinstance(source, File), "its name ends like a file's"
    for conversation in read_conversations(source.rows(), Columns(), path, "sample"):
        messages = [*conversation.messages]
        while messages and messages[-1]["role"] == ASSISTANT:
            messages.pop()
        if not messages:
            raise BadInput("sample", path, f"chats that ask something; {conversation.name} does not")
        yield messages
