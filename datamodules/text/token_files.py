"""Tokens of conversations in files, made once and mapped into memory: sets larger than memory are read from disk."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apprentice.batch import IGNORED
from apprentice.errors import BadInput
from datamodules.splits import Split
from datamodules.text.chat_templates import Template
from datamodules.text.conversations import Conversation
from datamodules.text.marked_turns import TokenizedConversation
from datamodules.text.near_prompts import HASHES, sign

VERSION = 4
GROUPS = "groups.bin"  # of texts that are grouped by more than their prompts
SIGNATURES = "signatures.bin"
PLAIN = "messages", "prompt as prompt, response as response", "text"  # shapes of which nothing is said
LISTED = 5  # names of conversations in a message
EMPTY, CUT_OFF = "empty", "cut off by max_length before the response"
NO_PROMPT = "of which the assistant's turn is the first"
NOTHING = TokenizedConversation(np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.int64))
# Of each text: its first token and its first one after the end; the tokens before the first that is learned; how many
# are learned; the bytes of these; a hash of its prompt.
INDEX = np.dtype(
    [("start", "<i8"), ("stop", "<i8"), ("before", "<i4"), ("learned", "<i4"), ("bytes", "<i4"), ("prompt", "<u8")]
)


@dataclass(frozen=True)
class TokenFile:
    """Tokens of n texts of at most `max_length` each, mapped from a folder.

    `facts` say what was left out: counts and names by reason, and which columns and keys were read and which were not.
    No split parts texts of one group.
    """

    folder: Path
    tokens: np.ndarray  # of all texts, one after the other
    learned: np.ndarray  # (tokens,) bool
    index: np.ndarray  # (n,) of INDEX
    facts: dict[str, Any]
    groups: np.ndarray  # (n,); where a source has none, those of a prompt
    signatures: np.ndarray  # (n, 64), see `near_prompts`

    @classmethod
    def open(cls, folder: Path) -> "TokenFile":
        """Map the files of a folder that `write_tokens` wrote; BadInput if they are not whole."""
        try:
            facts = json.loads((folder / "facts.json").read_text())
            tokens, learned, index = (
                np.fromfile(path, kind) if not path.stat().st_size else np.memmap(path, kind, "r")
                for path, kind in (
                    (folder / "tokens.bin", np.dtype(facts["type"])),
                    (folder / "learned.bin", np.dtype(bool)),
                    (folder / "index.bin", INDEX),
                )
            )
            groups = np.fromfile(folder / GROUPS, np.int64) if facts.get("grouped") else index["prompt"]
            signatures = np.fromfile(folder / SIGNATURES, np.uint32).reshape(-1, HASHES)
            counts = facts["tokens"], facts["tokens"], *[facts["texts"]] * 3
            if tuple(map(len, (tokens, learned, index, groups, signatures))) != counts:
                raise ValueError("files were cut short")
        except (OSError, ValueError, LookupError) as error:
            raise BadInput("data.cache_dir", folder, f"whole files of tokens, or none: delete it; {error}") from None
        return cls(folder, tokens, learned, index, facts, groups, signatures)

    def describe_shape(self) -> str:
        """What the texts were made of, as text; "" if these are columns of a usual file, and all that it has."""
        shape, unread = self.facts["shape"], ", ".join(self.facts["unread"])
        return f"{shape}; not read: {unread}" if unread else "" if shape in PLAIN else shape

    def describe_left_out(self) -> str:
        """What was left out and cut, as text; "" if nothing was."""
        parts = [
            f"{entry['count']:,} {what} ({', '.join(entry['names'])}{', …' * (entry['count'] > len(entry['names']))})"
            for what, entry in self.facts["left_out"].items()
        ]
        left_out = f"left out, as no token of a response is left: {'; '.join(parts)}" if parts else ""
        shortened, borders = self.facts["shortened"], self.facts["borders"]
        cut = f"{shortened:,} end at max_length" if shortened else ""
        border = f"{borders:,} tokens across a response's borders are not learned" if borders else ""
        return "; ".join(filter(None, (left_out, cut, border)))


@dataclass(frozen=True)
class TokenizedTexts:
    """Samples of a token file: the texts at `places` (n,), each a row that is filled up to the longest of a batch.

    Attributes:
        labels: (n,) int64, the number of labels that count in each: the tokens that are learned.
        lengths: (n,) int64, tokens of inputs in each: all but the last one.
    """

    file: TokenFile
    places: Tensor
    labels: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, file: TokenFile, places: Tensor) -> "TokenizedTexts":
        index = file.index[places.numpy()]
        counting = torch.from_numpy(index["learned"].astype(np.int64))
        return cls(file, places, counting, torch.from_numpy(index["stop"] - index["start"] - 1))

    def take(self, chosen: Tensor, length: int | None = None) -> Split:
        """Return inputs and labels of the texts at (k,) places, both (k, T) int64; T is the longest, or `length`.

        A label is the next token if that is learned, else -100. Rows are filled up at their ends with token 0.
        """
        width = int(self.lengths[chosen].max()) if length is None and len(chosen) else length or 1
        inputs = np.zeros((len(chosen), width), np.int64)
        labels = np.full((len(chosen), width), IGNORED, np.int64)
        for row, place in enumerate(self.places[chosen].tolist()):
            tokens, learned = self.text(place)
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = np.where(learned[1:], tokens[1:], IGNORED)
        return Split(torch.from_numpy(inputs), torch.from_numpy(labels))

    def text(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (n,) int64 of the text at a place of the file, and which are learned, (n,) bool."""
        start, stop = (int(self.file.index[place][name]) for name in ("start", "stop"))
        return self.file.tokens[start:stop].astype(np.int64), np.asarray(self.file.learned[start:stop])

    def prompt(self, chosen: int) -> Tensor:
        """Return (t,) int64, the tokens before the first that is learned, of the text at a place of these."""
        place = int(self.places[chosen])
        return torch.from_numpy(self.text(place)[0][: self.file.index[place]["before"]])

    def response_bytes(self) -> Tensor:
        """Return (n,) int64, the bytes in UTF-8 of what is learned of each text: of a response that is cut, the rest.

        Special tokens, as a response's end, have none.
        """
        return torch.from_numpy(self.file.index[self.places.numpy()]["bytes"].astype(np.int64))

    def tokens_per_byte(self, places: Tensor | None = None) -> float:
        """Return the tokens that are learned for each of their bytes, in the texts at (k,) places, or in all."""
        tokens, size = (x if places is None else x[places] for x in (self.labels, self.response_bytes()))
        return int(tokens.sum()) / max(int(size.sum()), 1)

    def to(self, device: torch.device) -> "TokenizedTexts":
        """Stay on disk; batches move."""
        return self


def write_tokens(
    folder: Path,
    conversations: Iterable[Conversation],
    template: Template,
    max_length: int,
    size: int,
    groups: Mapping[str, int] | None = None,
) -> None:
    """Write tokens of conversations into a folder, which appears when it is whole; `size` is that of the vocabulary.

    Texts end after `max_length` tokens. Those without a token to learn are left out. `groups` are numbers by the
    conversations' names.

    Raises:
        BadInput: a conversation does not fit the template, or the folder can't be written.
    """
    kind = np.uint16 if size <= 2**16 else np.int32
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            facts = _write(temporary, conversations, template, max_length, np.dtype(kind), groups)
            (temporary / "facts.json").write_text(json.dumps(facts, indent=1))
            temporary.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was faster
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise BadInput("data.cache_dir", folder.parent, f"a folder that can be written ({error.strerror})") from error


def _write(
    folder: Path,
    conversations: Iterable[Conversation],
    template: Template,
    max_length: int,
    kind: np.dtype,
    groups: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Write the files; return the facts."""
    counts, names, numbers, shape, unread = Counter[str](), dict[str, list[str]](), list[int](), "", set[str]()
    with contextlib.ExitStack() as stack:
        paths = (folder / name for name in ("tokens.bin", "learned.bin", "index.bin", SIGNATURES))
        tokens, learned, index, signatures = (stack.enter_context(path.open("wb")) for path in paths)
        for conversation in conversations:
            why = EMPTY if conversation.is_empty else NO_PROMPT if conversation.lacks_prompt else None
            encoded = NOTHING if why else template.encode(conversation)
            shape = shape or conversation.shape
            unread.update(conversation.unread, (key for key in conversation.keys if not template.reads(key)))
            kept = encoded.first(max_length)
            if not kept.learned[1:].any():
                why = why or (CUT_OFF if encoded.learned[1:].any() else EMPTY)
                names.setdefault(why, []).append(conversation.name)
                counts[why] += 1
                del names[why][LISTED:]
                continue
            if groups is not None:
                numbers.append(groups[conversation.name])
            index.write(_entry(conversation.prompt, kept, counts["tokens"]).tobytes())
            tokens.write(kept.tokens.astype(kind).tobytes())
            learned.write(kept.learned.tobytes())
            signatures.write(sign(conversation.question).tobytes())
            counts["tokens"] += len(kept.tokens)
            counts["texts"] += 1
            counts["shortened"] += len(encoded.tokens) > max_length
            counts["borders"] += encoded.cut
    if groups is not None:
        np.array(numbers, np.int64).tofile(folder / GROUPS)
    left_out = {why: {"count": counts[why], "names": names[why]} for why in (EMPTY, NO_PROMPT, CUT_OFF) if counts[why]}
    sizes = {what: counts[what] for what in ("tokens", "texts", "shortened", "borders")}
    facts = {"version": VERSION, "type": kind.str, "grouped": groups is not None, "left_out": left_out, **sizes}
    return {**facts, "shape": shape, "unread": sorted(unread)}


def _entry(prompt: str, kept: TokenizedConversation, start: int) -> np.ndarray:
    learned = kept.learned[1:]
    key = hashlib.blake2b(prompt.encode(errors="surrogatepass"), digest_size=8).digest()
    counts = learned.argmax() + 1, learned.sum(), kept.sizes[1:][learned].sum()
    return np.array((start, start + len(kept.tokens), *counts, int.from_bytes(key, "little")), INDEX)


def hash_file(path: Path) -> str:
    """Hash the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()


def is_writable(folder: Path) -> bool:
    """Whether files may be made in a folder, which may not be there yet; an administrator could in any."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)
