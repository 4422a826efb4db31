"""Conversations to learn responses from: prompts and responses, turns of a chat, or plain texts."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from apprentice.errors import BadInput
from datamodules import splits
from datamodules.batch_shapes import BatchShapes, TypicalBatch
from datamodules.data_hooks import LIMITS
from datamodules.fingerprints import Fingerprint
from datamodules.loaders import EpochOrder
from datamodules.text.base import Question, TextData
from datamodules.text.chat_templates import Template, template_of
from datamodules.text.conversation_files import Source, open_sources
from datamodules.text.conversations import Columns, Conversation, Learn, read_conversations
from datamodules.text.loaders import LengthOrder, LossPer, TextLoader, pack_texts
from datamodules.text.marked_turns import CONTROL, MarkedTurns
from datamodules.text.near_prompts import count_near
from datamodules.text.python_help import PythonHelp
from datamodules.text.token_files import VERSION, TokenFile, TokenizedTexts, is_writable, write_tokens
from datamodules.text.vocabulary import Subwords, Vocabulary

FEW = 1000  # conversations that are looked at
EXAMPLE = 16  # tokens of the inputs with which nets are tried
EVALUATED = ("validation", "test")
FOLDER = ".apprentice"


class Chat(TextData):
    """Conversations of which the assistant's turns, with the tokens that end them, are learned.

    A sample is a conversation; it is split from others by its prompt, so no prompt is in two parts. Rows of a batch are
    filled up at their ends to the longest; what is no response, and what fills up, has the label -100. A loss is the
    mean over the tokens of all responses of a global batch. Conversations without a token to learn are left out, by
    name. Tokens are kept in files that any later run with the same tokenizer, template and content maps into memory.

    Attributes:
        vocabulary: what tokens stand for; known after `setup`.
        block_size: tokens of a text at most.

    Args:
        path: a file of JSON lines, of a JSON array, or of Parquet; or a data set of Hugging Face, by folder or name, as
            NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT, whose split `test` is tested on if there is one.
            Parquet and data sets need the extra `datasets`. Default: questions about names of Python's library, and the
            first sentences of what its documentation says of them.
        prompt: the column of prompts; its values are texts, or lists of messages.
        response: the column of responses, likewise.
        messages: in place of both, the column of lists of messages, each with a `role` and a `content`, or `from` and
            `value`. Columns `system` and `tools` beside it are read, too.
        text: in place of these, the column of plain texts, which are learned whole. Default: the columns `messages`,
            `conversations`, `prompt` and `response` or `completion`, `instruction`, `input` and `output`, or `text`:
            the first of these that there are.
        learn: all turns of the assistant, or the `last` of each conversation. Those of which a file says `weight` 0, or
            `loss` or `train` false, are not learned.
        test_path: conversations to test on, all of them unless `test_size` says less; default: drawn from `path`.
        tokenizer: `bytes`, `characters`, or a tokenizer of Hugging Face by name or folder. In `kd.py` a
            teacher that is a HuggingFaceLM brings its own; default: bytes.
        template: a file with a chat template in Jinja, in place of the tokenizer's own.
        max_length: tokens of a conversation, with its prompt; the end of a longer one is cut off.
        cache_dir: the folder of the token files; default: `.apprentice` beside `path`, or `~/.cache/apprentice` if
            nothing can be written there.
        batch_size: conversations in a batch over all devices together, whatever their number.
        sort_lengths: batches of conversations of about one length, in an order that is drawn: less is filled up.
        pack: put the conversations of a batch into as few rows as they fit in; they don't attend to one another, and
            without dropout their losses and gradients are those of a row each, up to rounding.
        loss_per: a loss is the mean over each `token` of all responses of a batch, or over each `sequence`, a
            conversation, of the mean over its tokens.
        options: `train_size`, `test_size`, `validation_size`, `seed` and `partition` of InMemoryData.

    Raises:
        BadInput: a value can't be used; when read, the data are absent, empty, no JSON lines in UTF-8, without such
            columns, or do not fit the template.
    """

    train_inputs_repeat = False  # rows of two batches have other lengths, and the logits of all would fill the memory
    train_texts_repeat = True
    has_prompts = True
    free_options = TextData.free_options | {"cache_dir"}

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        prompt: str | None = None,
        response: str | None = None,
        messages: str | None = None,
        text: str | None = None,
        learn: Learn = "all",
        test_path: str | Path | None = None,
        tokenizer: str | None = None,
        template: str | Path | None = None,
        max_length: int = 1024,
        cache_dir: str | Path | None = None,
        batch_size: int = 8,
        sort_lengths: bool = False,
        pack: bool = False,
        loss_per: LossPer = "token",
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        if not isinstance(max_length, int) or max_length < 2:
            raise BadInput("data.max_length", max_length, "a whole number of tokens, at least 2")
        if self.labelled is not None:
            raise BadInput("data.labelled", self.labelled, "not allowed, as each token of a response is its own label")
        for option, value, kind in (("loss_per", loss_per, LossPer), ("learn", learn, Learn)):
            if value not in get_args(kind):
                raise BadInput(f"data.{option}", value, " or ".join(get_args(kind)))
        if sort_lengths and pack:
            raise BadInput(
                "data.sort_lengths", True, "false beside `data.pack true`, which fills rows with any lengths"
            )
        if self.partition is not None and (sort_lengths or pack):
            flag = "sort_lengths" if sort_lengths else "pack"
            raise BadInput(f"data.{flag}", True, "false beside `data.partition`, which deals conversations one by one")
        self.sort_lengths, self.packs_samples, self.loss_per = sort_lengths, pack, loss_per
        self.columns, self.learn = Columns(prompt, response, messages, text), learn
        self.columns.check()
        self.path, self.test_path = (None if p is None else str(p) for p in (path, test_path))
        self.tokenizer, self.block_size = tokenizer, max_length
        self.template = None if template is None else Path(template).expanduser()
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        self.input_shape = self.label_shape = (min(max_length, EXAMPLE),)
        self._files: list[TokenFile] = []  # of `path`, and of `test_path`

    def setup(self, stage: str | None = None) -> None:
        """Read the data once; says what is left out."""
        if self._splits:
            return
        sources = open_sources(self.path, self.test_path)
        self.vocabulary = self._vocabulary(sources)
        template = self.conversation_template()
        has_turns = next(self._conversations(sources[0])).text is None
        self.chat_template = template if has_turns else None
        self.end_tokens = template.ends() if has_turns else template.ends_of_texts()
        self._files = [self._open(source, template) for source in sources]
        for source, file in zip(sources, self._files, strict=True):
            if not len(file.index):
                expected = f"a token of a response in some conversation; {file.describe_left_out()}"
                raise BadInput(source.flag, source, expected)
            if line := file.describe_shape():
                self.say(f"{source}: reads {line}")
            if line := file.describe_left_out():
                self.say(f"{source}: {line}")
        self.say_left_out()
        if has_turns and not template.ends_turns():
            self.say("no special token ends a turn of this template: nets don't learn where a response ends")
        self._split()
        self.limit_parts(None)

    def limit_parts(self, trainer: Trainer | None) -> None:
        places = {part: self._evaluated_places(part, self._samples_in_limit(part, trainer)) for part in EVALUATED}
        self.tokens_per_byte = {part: self._texts(part).tokens_per_byte(places.get(part)) for part in LIMITS}

    def check_same_texts(self, other: TextData, flag: str, value: str) -> None:
        """Raise BadInput for `flag` unless another data module, with other tokens, has left out the same conversations.

        Its parts would be other ones, too, and a net tested on what another has learned.
        """
        prompts = [[file.index["prompt"] for file in data._files] for data in (self, cast("Chat", other))]
        if not all(map(np.array_equal, *prompts)):
            left, right = (sum(map(len, of)) for of in prompts)
            expected = f"{left:,} conversations in its tokens, too, not {right:,}: with a larger `data.max_length`"
            raise BadInput(flag, value, f"{expected} than {self.block_size} both have all")

    def check_net(self, net: Any, whose: str, trained: bool = True) -> None:
        """Raise BadInput if the net's tokens are others, or its encoder can't tell where a prompt ends."""
        super().check_net(net, whose, trained)
        if net.prompt_end is None:
            return
        texts = self._texts("train")
        for chosen in range(min(len(texts.places), FEW)):
            prompt = texts.prompt(chosen)
            if len(prompt) and not (prompt == net.prompt_end).any():
                expected = f"a template whose prompts end with token {net.prompt_end}, at which {whose} parts a row"
                raise BadInput("data.template", self.template or "of its own", expected)

    def _split(self) -> None:
        """Draw the parts; no prompt, and no group of a source's own, is in two of them."""
        training, *others = self._files
        prompts = [file.index["prompt"] for file in self._files]
        known = np.isin(prompts[0], prompts[1]) if others else np.zeros(len(prompts[0]), bool)
        if known.any():
            self.say(f"{known.sum():,} conversations do not train, as their prompts are in the test's")
        if known.all():
            expected = "conversations with other prompts than `data.path`: all of these are among them, and none trains"
            raise BadInput("data.test_path", self.test_path or self.path, expected)
        usable = torch.from_numpy(np.flatnonzero(~known))
        groups = torch.from_numpy(np.unique(training.groups[~known], return_inverse=True)[1])
        one_class, count = torch.zeros(max(map(len, prompts)), dtype=torch.int64), len(usable)
        self.test_is_drawn = not others
        try:
            if others:
                test = splits.draw_test(one_class[: len(prompts[1])], self.test_size, self.seed, self.subset)
                rest = torch.arange(count)
            else:
                test = splits.hold_out_test(one_class[:count], self.test_size, self.seed, groups)
                rest = splits.complement(test, count)
            sizes = self.train_size, self.validation_size, self.seed, self.subset
            drawn = splits.draw_train_and_validation(one_class[: len(rest)], *sizes, groups[rest])
        except BadInput as fault:
            if fault.argument != "data.group_duplicates":
                raise
            expected = "prompts that repeat less often: all answers to one stay in one part"
            raise BadInput("data.path", self.path, expected) from None
        train, validation = (TokenizedTexts.of(training, usable[rest[places]]) for places in drawn)
        tested = TokenizedTexts.of(others[0], test) if others else TokenizedTexts.of(training, usable[test])
        signatures = (x.file.signatures[x.places.numpy()] for x in (tested, train))
        if near := count_near(*signatures):
            self.say(f"{near:,} of {len(tested.places):,} test prompts nearly equal one that trains")
        parts: dict[str, Any] = {"train": train, "validation": validation, "test": tested}
        self._splits = parts

    def _conversations(self, source: Source) -> Iterator[Conversation]:
        return read_conversations(source.rows(), self.columns, source, source.flag, self.learn)

    def _vocabulary(self, sources: Iterable[Source]) -> Vocabulary | Subwords:
        if self.tokenizer in {None, "bytes"}:
            return Vocabulary()
        if self.tokenizer == "characters":
            characters = set[str]()
            for source in sources:
                for conversation in self._conversations(source):
                    characters |= MarkedTurns.characters(conversation)
            return Vocabulary("".join(characters))
        return Subwords(str(self.tokenizer))

    def conversation_template(self) -> Template:
        """Return what makes tokens of a conversation."""
        text = None
        if self.template is not None:
            try:
                text = self.template.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadInput("data.template", self.template, f"a file with a chat template; {error}") from None
        if text is not None and not isinstance(self.vocabulary, Subwords):
            expected = f"not allowed with `data.tokenizer {self.tokenizer or 'bytes'}`, which has its own"
            raise BadInput("data.template", self.template, expected)
        return template_of(self.vocabulary, text, self.template)

    def _open(self, source: Source, template: Template) -> TokenFile:
        """Map the tokens of a source, which an earlier run may have written."""
        determines = [VERSION, source.key(), tuple(self.columns), self.learn, self.block_size, template.key()]
        name = hashlib.blake2b(repr(determines).encode(errors="surrogatepass"), digest_size=12).hexdigest()
        folder = self._cache_folder(source) / f"{name}.tokens"
        if not folder.is_dir():
            groups = source.groups() if isinstance(source, PythonHelp) else None
            conversations = self._conversations(source)
            write_tokens(folder, conversations, template, self.block_size, len(self.vocabulary), groups)
        return TokenFile.open(folder)

    def _cache_folder(self, source: Source) -> Path:
        if self.cache_dir is not None:
            return self.cache_dir
        if source.folder is not None and is_writable(beside := source.folder / FOLDER):
            return beside
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "apprentice"

    def all_tokens(self) -> Iterable[np.ndarray]:
        return [file.tokens for file in self._files]

    def fingerprint(self) -> Fingerprint:
        """Of the token files, whose names are hashes of what determines them, and of the places in them."""
        return {part: f"{self._texts(part).file.folder.stem} {_hash(self._texts(part).places)}" for part in LIMITS}

    def test_units(self, places: np.ndarray) -> dict[str, np.ndarray]:
        test, chosen = self._texts("test"), torch.from_numpy(places).long()
        prompts = test.file.index[test.places[chosen].numpy()]["prompt"]
        return {"unit": prompts, "size": test.response_bytes()[chosen].numpy()}

    def questions(self, count: int) -> list[Question]:
        """Return so many questions of the test: of chats, no two with one first prompt, each turn that is learned.

        Before it stand the data's own turns. Plain texts ask nothing.
        """
        test, questions, known = self._texts("test"), list[Question](), set[int]()
        for place in test.places.tolist():
            if len(questions) >= count:
                break
            if (prompt := int(test.file.index[place]["prompt"])) in known:
                continue
            known.add(prompt)
            tokens, learned = test.text(place)
            edges = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2).tolist()
            after = 0
            for turn, (begin, end) in enumerate(edges if edges[0][0] > 1 else [], 1):
                response = tokens[begin:end]
                if int(response[-1]) in self.end_tokens:
                    response = response[:-1]
                prompt_tokens, reference, asks = map(torch.from_numpy, (tokens[:begin], response, tokens[after:begin]))
                questions.append(Question(prompt_tokens, reference, asks, turn))
                after = end
        return questions[:count]

    def show_prompt(self, prompt: Tensor) -> str:
        """Return a prompt's tokens (t,) as a text for people, its marks of turns as line ends."""
        return CONTROL.sub("\n", self.vocabulary.decode(prompt)).strip()

    def _texts(self, part: str) -> TokenizedTexts:
        return cast("TokenizedTexts", self.split(part))

    def train_dataloader(self) -> TextLoader:  # type: ignore[override]
        """Global batches in the order of (order_seed, epoch), each cut into contiguous shares for the ranks."""
        rank, replicas = self._rank_and_replicas()
        self.check_replicas(replicas, getattr(self.trainer and self.trainer.strategy, "exact", None))
        texts = self._texts("train")
        order = self._order(len(texts.places))
        return TextLoader(texts, self.batch_size, order, rank, replicas, self.packs_samples, self.loss_per)

    def batch_shapes(self, epoch: int) -> BatchShapes:
        texts, kept = self._texts("train"), self._samples_in_limit("train", self.trainer)
        batches = self.order_of(epoch)[:kept].split(self.batch_size)
        lengths = [texts.lengths[places] for places in batches]
        rows = [len(pack_texts(x.tolist())) if self.packs_samples else len(x) for x in lengths]
        columns = (
            [*map(len, batches)],
            rows,
            [int(x.max()) for x in lengths],
            [int(texts.labels[x].sum()) for x in batches],
        )
        return BatchShapes(*map(torch.tensor, columns))

    def typical_batch(self, dtype: torch.dtype | None = None) -> TypicalBatch:
        texts = self._texts("train")
        batches = self.order_of(0).split(self.batch_size)
        places, tokens = batches[self.batch_shapes(0).typical()], int(texts.lengths.sum()) / len(batches)
        order = EpochOrder(len(texts.places), self.order_seed)
        loader = TextLoader(texts, self.batch_size, order, pack=self.packs_samples, loss_per=self.loss_per)
        return TypicalBatch(loader.batch(places), tokens)

    def _order(self, size: int) -> EpochOrder:
        if self.sort_lengths:
            return LengthOrder(self._texts("train").lengths, self.batch_size, *self._order_options)
        return super()._order(size)


def _hash(places: Tensor) -> str:
    return hashlib.blake2b(places.numpy().tobytes(), digest_size=12).hexdigest()
