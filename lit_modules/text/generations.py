"""A teacher's own responses to the prompts of a training set, made once (sequence-level distillation)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import Batch, label_mask
from lit_modules.nets.generation import Generated, Sampling, generate, row_keys
from lit_modules.nets.identity import identify
from lit_modules.text.stored_teacher.store import read_texts
from lit_modules.training.tensor_folder import TensorFolder

ROWS = 8  # of a chunk
KEY = tuple(b"generations")  # of the draws


class Settings(NamedTuple):
    """How responses are written."""

    max_new_tokens: int
    temperature: float
    seed: int  # of the draws; 0 where there are none
    ends: tuple[int, ...]


class Generations:
    """What a frozen teacher writes for each prompt of a training set.

    Ranks write chunks of fixed rows and order, so that the texts do not depend on their number, and keep each in a file
    of a folder: a killed run goes on where it was, and a later one with the same teacher, texts and settings writes
    nothing.

    Args:
        teacher: the whole net.
        settings: how it writes.
        folder: of the files; None keeps responses in memory alone.
        tell: prints a line, on one rank.
    """

    def __init__(
        self, teacher: nn.Module, settings: Settings, folder: str | Path | None, tell: Callable[[str], object]
    ) -> None:
        self.teacher, self.settings, self.tell = teacher, settings, tell
        self.folder = None if folder is None else Path(folder).expanduser()
        self._identity = identify(teacher) if folder else ""  # before it runs, which may change attributes
        self._tokens = torch.zeros(0)  # (samples, N)
        self._lengths: Tensor | None = None  # (samples,)
        self._tried: dict[tuple[int, ...], Generated] = {}  # for rows of a batch, before all are written

    def fill(self, data: Any, trainer: Trainer) -> None:
        """Write, or read, the responses to all prompts of a data module; collective.

        Raises:
            BadInput: a file is damaged.
        """
        device, count = trainer.strategy.root_device, int(data.places)

        def rows(index: Tensor) -> Batch:
            inputs, labels = data.samples("train", index)
            batch = Batch.of((inputs.to(device), labels.to(device)), 0, shared=False)
            return batch._replace(index=index.to(device))

        folder = None
        if self.folder is not None:
            texts = read_texts(map(rows, chunks(count, ROWS)), count, device).digest
            facts = {"teacher": self._identity, "texts": texts, "precision": str(trainer.precision)}
            folder = TensorFolder(self.folder, "responses", facts | self.settings._asdict())
            if not folder.is_whole:
                folder.tell_of_older(self.tell)
        new = torch.zeros((), device=device)

        def write(index: Tensor) -> Generated:
            first = int(index[0])
            if folder is not None and folder.file(first).exists():
                kept = folder.read(first)
                return Generated(kept["tokens"].long().to(device), kept["lengths"].to(device))
            written = self._write(rows(index))
            new.add_(len(index))
            if folder is not None:
                folder.write(first, {"tokens": written.tokens.int(), "lengths": written.lengths})
            return written

        self._tokens, self._lengths = generate_across_ranks(count, ROWS, self.settings.max_new_tokens, device, write)
        made = int(replicas.all_reduce_sum_(new))
        if folder is not None and not folder.is_whole and replicas.rank() == 0:
            folder.finish(range(0, count, ROWS), {})
        where = "" if folder is None else f", kept in {folder.path}"
        self.tell(f"teacher's responses to {count:,} prompts: {made:,} written, {count - made:,} read{where}")
        self._tried.clear()

    def take(self, batch: Batch) -> Generated:
        """Return the responses to a batch's prompts."""
        if self._lengths is not None:
            return Generated(self._tokens[batch.index], self._lengths[batch.index])
        key = tuple(batch.index.tolist())
        if key not in self._tried:  # a step whose cost is measured
            self._tried[key] = self._write(batch)
        return self._tried[key]

    def _write(self, batch: Batch) -> Generated:
        settings, kind = self.settings, batch.inputs.device.type
        keys = row_keys(batch.index, settings.seed, *KEY)
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind)):
            return generate(
                self.teacher, batch.inputs, prompt_lengths(batch.labels), settings.max_new_tokens, keys,
                Sampling(settings.temperature), settings.ends,
            )  # fmt: skip


def chunks(count: int, rows: int) -> Iterator[Tensor]:
    """Yield places among `count`, so many at a time, of the chunks that are this rank's."""
    for start in range(rows * replicas.rank(), count, rows * replicas.count()):
        yield torch.arange(start, min(start + rows, count))


def generate_across_ranks(
    count: int, rows: int, width: int, device: torch.device, write: Callable[[Tensor], Generated]
) -> Generated:
    """Return responses of at most `width` tokens to `count` prompts, of which each rank writes some; collective.

    Args:
        count: of prompts.
        rows: prompts of a chunk, which is the same whatever the number of ranks.
        width: N, new tokens of a response at most.
        device: of the responses.
        write: places (b,) to the responses of a chunk.
    """
    tokens = torch.zeros(count, width, dtype=torch.int64, device=device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    for index in chunks(count, rows):
        tokens[index], lengths[index] = write(index)
    return Generated(replicas.all_reduce_sum_(tokens), replicas.all_reduce_sum_(lengths))


def prompt_lengths(labels: Tensor) -> Tensor:
    """Return (b,), the tokens before the first response of rows with labels (b, T); 0 in a row without one."""
    counts = label_mask(labels)
    return (counts.int().argmax(1) + 1).where(counts.any(1), 0)
