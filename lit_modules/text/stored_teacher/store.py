"""A teacher's outputs for the tokens of a training set that count, written by the first run and read by all."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import IGNORED, Batch, label_mask
from apprentice.errors import BadInput
from lit_modules.nets.identity import hash_weights, identify
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.served import Decode, Served
from lit_modules.nets.stored import StoredTeacher
from lit_modules.objectives.base import Objective
from lit_modules.objectives.text_objective import of_texts
from lit_modules.text.stored_teacher.forms import Form, Stored
from lit_modules.training.tensor_folder import FLAG, TensorFolder, add_hashes

Ask = Callable[[Batch], Outputs]


class TextCounts(NamedTuple):
    """The texts of a training set: how many tokens of each count, and a hash of all."""

    counts: np.ndarray  # (samples,) int64, tokens of each that count
    digest: str  # of all tokens and labels, however they are padded

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.counts.cumsum()])


def read_texts(chunks: Iterable[Batch], samples: int, device: torch.device | None = None) -> TextCounts:
    """Count and hash the tokens of a rank's chunks of a training set, and, on a device, add those of all ranks."""
    counts, total = torch.zeros(samples, dtype=torch.int64), 0
    for chunk in chunks:
        mask = label_mask(chunk.labels).cpu()
        counts[chunk.index.cpu()] = mask.sum(1)
        inputs, labels = (np.ascontiguousarray(x.cpu().numpy().astype("<i8")) for x in (chunk.inputs, chunk.labels))
        for row, place in enumerate(chunk.index.tolist()):
            length = int(mask[row].nonzero().max()) + 1 if mask[row].any() else 0
            text = hashlib.blake2b(place.to_bytes(8, "little"), digest_size=8)
            text.update(inputs[row, :length].tobytes())
            text.update(labels[row, :length].tobytes())
            total += int.from_bytes(text.digest(), "little")
    digest = f"{total % 2**64:016x}"
    if device is not None:
        (digest,) = add_hashes(total, device=device)
        counts = replicas.all_reduce_sum_(counts.to(device)).cpu()
    return TextCounts(counts.numpy(), digest)


def form_of(stored: Stored, objectives: Mapping[str, Objective], classes: int) -> Form:
    """Return the form of what is stored for these methods and V classes."""
    temperatures = {t for o in objectives.values() if o.uses_teacher for t in of_texts(o).temperatures}
    return Form.of(stored, {*temperatures, *stored.temperatures}, classes)


class TextStore:
    """A frozen teacher's outputs for each token of a training set that counts, in files that later runs read.

    Ranks compute chunks of fixed size and order and write each to a file, whose bytes do not depend on their number.
    The folder's name is a hash of the teacher, the texts and the form. A later run maps the files into memory; it needs
    no teacher, but a `StoredTeacher`. One that is served is asked by each rank for its chunks.

    Args:
        teacher: the net, before a strategy shards it, or a `StoredTeacher`.
        folder: in which that of these files is the only one of its teacher, texts and form.
        form: what is stored of a distribution.
        classes: V.
        source: what tells the teacher without its weights; by default its `identify` does.
        tell: prints a line, on one rank.
    """

    def __init__(
        self, teacher: nn.Module, folder: str | Path, form: Form, classes: int, source: str | None,
        tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.folder, self.form, self.classes, self.tell = Path(folder).expanduser(), form, classes, tell
        self.served = teacher if isinstance(teacher, Served) else None
        self.is_loaded = not isinstance(teacher, StoredTeacher | Served)
        self.expected = {"weights": hash_weights(teacher)} if self.is_loaded else {}
        self.source = source or (identify(teacher) if self.is_loaded else teacher.teacher)
        self.blocks: Blocks | None = None

    def kept(self, texts: TextCounts, precision: str) -> TensorFolder:
        """Return the folder for these texts."""
        form = {"k": self.form.k, "tail": self.form.tail, "temperatures": list(self.form.temperatures)}
        of_texts = {"texts": texts.digest, "samples": len(texts.counts), "classes": self.classes}
        facts = {"teacher": self.source, **of_texts, **form, "precision": precision}
        return TensorFolder(self.folder, "distributions", facts)

    def find(self, texts: TextCounts, precision: str) -> Path | None:
        """Return the whole folder, its checksums compared, if there is one; BadInput for one that is damaged."""
        folder = self.kept(texts, precision)
        if not folder.is_whole:
            return None
        blocks = Blocks(folder, folder.read_facts(self.expected)["block"], texts)
        for number in blocks.numbers:
            blocks.read(number)
        return folder.path

    @property
    def is_filled(self) -> bool:
        return self.blocks is not None

    def set_objectives(self, objectives: Mapping[str, Objective]) -> None:
        """Raise BadInput if a method can't learn from what is stored of a teacher."""
        for name, objective in objectives.items():
            if objective.uses_teacher:
                _check_method(self.form, f"variants.{name}", objective)
                if self.served is not None and self.form.tail == "bucket":
                    _check_temperatures(f"variants.{name}.temperature", objective)

    def is_wanted(self, data: Any, _epochs: float) -> bool:
        """Say yes, or raise BadInput if samples are not the same texts in each epoch."""
        if not getattr(data, "train_texts_repeat", False):
            name = getattr(data, "name", type(data).__name__)
            raise BadInput("data", name, "texts that are the same in each epoch beside `teacher_top_k`")
        return True

    def fill(self, data: Any, ask: Ask, trainer: Trainer) -> int:
        """Open the folder for a data module's training set, on all ranks; write its files first, if it is not whole.

        Returns for how many samples the teacher has computed outputs.
        """
        rank, ranks = replicas.rank(), replicas.count()
        precision, device = str(trainer.precision), trainer.strategy.root_device

        def chunks() -> Iterable[Batch]:
            return (data.on_after_batch_transfer(chunk, 0) for chunk in data.train_in_order(rank, ranks))

        texts = read_texts(chunks(), data.places, device)
        folder = self.kept(texts, precision)
        is_there = torch.tensor(int(rank == 0 and folder.is_whole), device=device)
        computes = not replicas.all_reduce_sum_(is_there)
        if computes:
            if ranks != trainer.world_size:
                expected = "ddp, or another strategy whose ranks all have the teacher, to store its outputs"
                raise BadInput("trainer.strategy", type(trainer.strategy).__name__, f"{expected}; then any reads them")
            if not (self.is_loaded or self.served):
                raise BadInput(FLAG, folder.path, "the outputs that were there when this run began; they are gone")
            folder.tell_of_older(self.tell)
            decode = data.vocabulary.decode if self.served and hasattr(data, "vocabulary") else None
            computes = self._write(Blocks(folder, data.batch_size, texts), chunks(), ask, decode, device)
        self.blocks = Blocks(folder, folder.read_facts(self.expected)["block"], texts)
        self.blocks.check(device)
        if not computes:
            self.tell(f"teacher's outputs read from {folder.path}")
        return len(texts.counts) if computes else 0

    def _write(
        self, blocks: "Blocks", chunks: Iterable[Batch], ask: Ask, decode: Decode | None, device: torch.device
    ) -> bool:
        """Write the files, of which a killed run may have left some; return whether this run had to."""
        folder = blocks.folder
        with ExitStack() as stack:
            must = 0
            if replicas.rank() == 0:
                stack.enter_context(folder.locked(self.tell))
                must = int(not folder.is_whole)  # another run may have written it
            if not replicas.all_reduce_sum_(torch.tensor(must, device=device)):
                return False
            if not folder.path.exists():
                raise BadInput(FLAG, self.folder, "a folder that all ranks share, to store a teacher's outputs")
            self._write_blocks(blocks, chunks, ask, decode)
            replicas.all_reduce_sum_(torch.zeros(1, device=device))  # all ranks have written theirs
            if replicas.rank() == 0:
                folder.finish(blocks.numbers, {"block": blocks.size, **self.expected})
                tokens, size = int(blocks.starts[-1]), blocks.bytes() / 2**20
                self.tell(f"teacher's outputs kept in {folder.path}: {tokens:,} tokens, {self.form}, {size:.1f} MiB")
            replicas.all_reduce_sum_(torch.zeros(1, device=device))
        return True

    def _write_blocks(self, blocks: "Blocks", chunks: Iterable[Batch], ask: Ask, decode: Decode | None) -> None:
        """Compute a rank's blocks that are missing; all ranks ask a loaded teacher equally often: it may be sharded."""
        rank, ranks = replicas.rank(), replicas.count()
        written = [blocks.has(number) for number in blocks.numbers]
        for turn, chunk in enumerate(chunks):
            if all(written[turn * ranks : (turn + 1) * ranks]):
                continue
            block = turn * ranks + rank
            empty = not len(chunk.index)
            outputs = None if self.served else ask(_filler(chunk) if empty else chunk)
            if empty or written[block]:
                continue
            number = blocks.numbers[block]
            if outputs is None:
                stored = self._ask_server(chunk, decode)
            else:
                stored = self.form.reduce(outputs.logits[label_mask(chunk.labels)], int(blocks.starts[number]))
            blocks.folder.write(number, stored)

    def _ask_server(self, chunk: Batch, decode: Decode | None) -> dict[str, Tensor]:
        """Return what is stored of a chunk; a text is sent up to the last token that counts, which is a label."""
        assert self.served is not None
        assert self.form.k is not None
        texts, places = list[list[int]](), list[Tensor]()
        for inputs, labels, counts in zip(chunk.inputs, chunk.labels, label_mask(chunk.labels).cpu(), strict=True):
            if counts.any():
                last = int(counts.nonzero().max())
                texts.append([*inputs[: last + 1].tolist(), int(labels[last])])
                places.append(counts[: last + 1])
        answers = self.served.top_tokens(texts, self.form.k, decode) if texts else []
        log_p, tokens = torch.zeros(0, self.form.k, dtype=torch.float64), torch.zeros(0, self.form.k).long()
        log_p = torch.cat([log_p, *(x[counts] for (x, _), counts in zip(answers, places, strict=True))])
        tokens = torch.cat([tokens, *(x[counts] for (_, x), counts in zip(answers, places, strict=True))])
        return self.form.pack_served(log_p, tokens, self.classes)

    def rows(self, batch: Batch) -> Outputs:
        """Return the teacher's outputs for a batch's rows; zeros for tokens that do not count."""
        assert self.blocks is not None
        counts = label_mask(batch.labels)
        index, lengths = batch.index, counts.sum(1)
        if batch.texts is not None:  # of which a row has several, one after the other
            index, lengths = batch.texts[counts].unique_consecutive(return_counts=True)
        return self.form.expand(self.blocks.of_samples(index.tolist(), lengths.tolist()), counts)

    def reduce(self, outputs: Outputs, batch: Batch) -> Outputs:
        """Return a teacher's outputs for a batch as they would be read from the files."""
        counts = label_mask(batch.labels)
        return self.form.expand(self.form.reduce(outputs.logits[counts], 0), counts)

    def clear(self) -> None:
        self.blocks = None


class Blocks:
    """What is stored of texts, in a file for so many samples each.

    Attributes:
        numbers: of the files, each the place of its first sample.
        starts: tokens before each sample, (samples + 1,).
    """

    def __init__(self, folder: TensorFolder, size: int, texts: TextCounts) -> None:
        self.folder, self.size, self.starts = folder, size, texts.starts
        self.numbers = range(0, len(texts.counts), size)
        self._read: dict[int, dict[str, Tensor]] = {}

    def tokens(self, number: int) -> int:
        """Return how many tokens a file is of."""
        return int(self.starts[min(number + self.size, len(self.starts) - 1)] - self.starts[number])

    def has(self, number: int) -> bool:
        return self.folder.has(number, self.tokens(number))

    def bytes(self) -> int:
        return sum(self.folder.file(number).stat().st_size for number in self.numbers)

    def read(self, number: int) -> dict[str, Tensor]:
        """Return what a file holds, mapped into memory; BadInput for a damaged one."""
        if number not in self._read:
            stored = self.folder.read(number)
            if any(len(x) != self.tokens(number) for x in stored.values()):
                expected = f"entries of {self.tokens(number):,} tokens; it has others: delete it"
                raise BadInput(FLAG, self.folder.file(number), expected)
            self._read[number] = stored
        return self._read[number]

    def check(self, device: torch.device) -> None:
        """Read all files, each by one rank; BadInput on all ranks for a damaged one; collective."""
        fault = None
        for number in self.numbers[replicas.rank() :: replicas.count()]:
            try:
                self.read(number)
            except BadInput as error:
                fault = error
        if replicas.all_reduce_sum_(torch.tensor(int(fault is not None), device=device)):
            raise fault or BadInput(FLAG, self.folder.path, "whole files; another process has found a damaged one")

    def of_samples(self, places: Sequence[int], lengths: Sequence[int]) -> dict[str, Tensor]:
        """Return what is stored of the tokens of samples at these places, one sample after the other.

        `lengths` are the tokens of each that count; BadInput for others than are stored.
        """
        parts = [{name: x[:0] for name, x in self.read(0).items()}]
        for place, length in zip(places, lengths, strict=True):
            number = place - place % self.size
            start, stop = self.starts[[place, place + 1]] - self.starts[number]
            if stop - start != length:
                expected = "as many labels in each text as when the teacher's outputs were stored"
                raise BadInput("data", "a batch", expected)
            parts.append({name: x[start:stop] for name, x in self.read(number).items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _check_method(form: Form, flag: str, objective: Objective) -> None:
    method = type(objective).__name__
    if layers := [*objective.teacher_layers.values()]:
        expected = f"a method of probabilities alone beside `teacher_top_k`; this one reads the layer {layers[0]}"
        raise BadInput(flag, method, f"{expected}, which is not stored")
    if share := of_texts(objective).on_policy:
        raise BadInput(f"{flag}.on_policy", share, "0 beside `teacher_top_k`: the teacher has to score new texts")
    if form.k is None:
        return
    if any(getattr(part, "standardize", False) for part in objective.modules()):
        why = "it needs the logits of all tokens"
        raise BadInput(f"{flag}.standardize", True, f"`teacher_top_k all` beside it: {why}")
    if form.tail not in (tails := of_texts(objective).tails):
        takes = " or ".join([f"`teacher_tail {tail}`" for tail in tails] or ["`teacher_top_k all`"])
        raise BadInput(flag, method, f"{takes} for this method, which can't learn from {form}")


def _check_temperatures(flag: str, objective: Objective) -> None:
    if others := {*of_texts(objective).temperatures} - {1.0}:
        expected = "1, or `teacher_tail renormalize`: the mass of other tokens is known at 1 alone of a served teacher"
        raise BadInput(flag, min(others), expected)


def _filler(chunk: Batch) -> Batch:
    """Return a batch of one text in the place of one of none."""
    texts = chunk.inputs.new_zeros(1, max(*chunk.inputs.shape[1:], 1))
    return chunk._replace(inputs=texts, labels=torch.full_like(texts, IGNORED))
