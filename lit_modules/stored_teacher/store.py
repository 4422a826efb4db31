"""A teacher's outputs for the tokens of a training set that count, written by the first run and read by all."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn

from apprentice import replicas
from apprentice.batch import IGNORED, Batch, label_mask
from apprentice.errors import BadInput, reason
from lit_modules.nets import Outputs
from lit_modules.nets.recorded import Recorded
from lit_modules.nets.stored import StoredTeacher
from lit_modules.objectives import Objective
from lit_modules.stored_teacher.file import FLAG, VERSION, Layout, Part, check_blocks, locked, read_layout
from lit_modules.stored_teacher.forms import Form, Stored

Ask = Callable[[Batch], Outputs]
WORDS = 2**32


class Texts(NamedTuple):
    """What a file's entries are of."""

    counts: np.ndarray  # (samples,) int64, tokens of each that count
    digest: str  # of all tokens and labels, however they are padded

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.counts.cumsum()])


def read_texts(chunks: Iterable[Batch], samples: int, device: torch.device | None = None) -> Texts:
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
    if device is not None:
        halves = torch.tensor([total % WORDS, total // WORDS % WORDS], device=device)
        low, high = replicas.all_reduce_sum_(halves).tolist()
        counts, total = replicas.all_reduce_sum_(counts.to(device)).cpu(), low + high * WORDS
    return Texts(counts.numpy(), f"{total % WORDS**2:016x}")


def form_of(stored: Stored, objectives: Mapping[str, Objective], classes: int) -> Form:
    """Return the form of what is stored for these methods and V classes."""
    temperatures = {t for objective in objectives.values() if objective.uses_teacher for t in objective.temperatures}
    return Form.of(stored, {*temperatures, *stored.temperatures}, classes)


class TextStore:
    """A frozen teacher's outputs for each token of a training set that counts, in a file that later runs read.

    Ranks compute chunks of fixed size and order and write them as blocks of a file, whose bytes do not depend on their
    number. The file's name is a hash of the teacher, the texts and the form. A later run reads the file through memory
    maps; it needs no teacher, but a `StoredTeacher`.

    Args:
        teacher: the net, before a strategy shards it, or a `StoredTeacher`.
        folder: of the file, in which it is the only one of its teacher, texts and form.
        form: what is stored of a distribution.
        classes: V.
        source: what tells the teacher without its weights; by default a hash of these does.
        tell: prints a line, on one rank.
    """

    def __init__(
        self, teacher: nn.Module, folder: str | Path, form: Form, classes: int, source: str | None,
        tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.folder, self.form, self.classes, self.tell = Path(folder).expanduser(), form, classes, tell
        self.is_loaded = not isinstance(teacher, StoredTeacher)
        self.weights = digest_weights(teacher) if self.is_loaded else None
        self.source = source or (self.weights if self.is_loaded else teacher.teacher)
        self.layout: Layout | None = None
        self.entries: np.ndarray | None = None

    def path(self, texts: Texts, precision: str) -> Path:
        key = repr([self.source, texts.digest, self.form, self.classes, precision]).encode()
        return self.folder / f"teacher-{hashlib.blake2b(key, digest_size=16).hexdigest()}.topk"

    def expected(self, texts: Texts, precision: str) -> dict[str, Any]:
        """Return what a file's header has to have."""
        form = {"k": self.form.k, "tail": self.form.tail, "temperatures": list(self.form.temperatures)}
        of_texts = {"data": texts.digest, "samples": len(texts.counts), "classes": self.classes}
        return {"version": VERSION, "teacher": self.source, **of_texts, **form, "precision": precision}

    def find(self, texts: Texts, precision: str) -> Path | None:
        """Return the whole file, its checksums compared, if there is one; BadInput for one that is damaged."""
        path = self.path(texts, precision)
        if not path.exists():
            return None
        layout = read_layout(path, self._known(texts, precision))
        _refuse_damaged(path, check_blocks(path, layout, range(layout.blocks)))
        return path

    def _known(self, texts: Texts, precision: str) -> dict[str, Any]:
        return self.expected(texts, precision) | ({"weights": self.weights} if self.weights else {})

    @property
    def is_filled(self) -> bool:
        return self.entries is not None

    def check(self, objectives: Mapping[str, Objective]) -> None:
        """Raise BadInput if a method can't learn from what is stored of a teacher."""
        for name, objective in objectives.items():
            if objective.uses_teacher:
                _check_method(self.form, f"variants.{name}", objective)

    def is_wanted(self, data: Any, _epochs: float) -> bool:
        """Say yes, or raise BadInput if samples are not the same texts in each epoch."""
        if not getattr(data, "train_texts_repeat", False):
            name = getattr(data, "name", type(data).__name__)
            raise BadInput("data", name, "texts that are the same in each epoch beside --teacher_top_k")
        return True

    def fill(self, data: Any, ask: Ask, trainer: Trainer) -> int:
        """Open the file for a data module's training set, on all ranks; write it first, if there is none.

        Returns for how many samples the teacher has computed outputs.
        """
        rank, ranks = replicas.rank(), replicas.count()
        precision, device = str(trainer.precision), trainer.strategy.root_device

        def chunks() -> Iterable[Batch]:
            return (data.on_after_batch_transfer(chunk, 0) for chunk in data.train_in_order(rank, ranks))

        texts = read_texts(chunks(), data.places, device)
        path = self.path(texts, precision)
        is_there = torch.tensor(int(rank == 0 and path.exists()), device=device)
        computes = not replicas.all_reduce_sum_(is_there)
        if computes:
            if ranks != trainer.world_size:
                expected = "ddp, or another strategy whose ranks all have the teacher, to store its outputs"
                raise BadInput("trainer.strategy", type(trainer.strategy).__name__, f"{expected}; then any reads them")
            if not self.is_loaded:
                raise BadInput(FLAG, path, "the outputs that were there when this run began; the file is gone")
            header = self._known(texts, precision) | {"block": data.batch_size}
            header["record"] = _plain(self.form.record(self.classes, precision.startswith("64")))
            computes = self._write(path, Layout(header, texts.starts), chunks(), ask, device)
        layout = read_layout(path, self._known(texts, precision))
        intact = check_blocks(path, layout, range(rank, layout.blocks, ranks))
        _refuse_damaged(path, not int(replicas.all_reduce_sum_(torch.tensor(int(not intact), device=device))))
        self.layout = layout
        self.entries = np.memmap(path, layout.record, "r", layout.entries, (int(layout.starts[-1]),))
        if not computes:
            self.tell(f"teacher's outputs read from {path}")
        return len(texts.counts) if computes else 0

    def _write(self, path: Path, layout: Layout, chunks: Iterable[Batch], ask: Ask, device: torch.device) -> bool:
        """Write the file, of which a killed run may have left blocks; return whether this run had to."""
        part = Part(path.with_name(f"{path.name}.part"), layout)
        with ExitStack() as stack:
            must = 0
            if replicas.rank() == 0:
                try:
                    stack.enter_context(locked(part.path, self.tell))
                    if must := int(not path.exists()):
                        part.prepare()
                    else:  # another run has written it
                        part.path.unlink(missing_ok=True)
                except OSError as error:
                    raise BadInput(FLAG, self.folder, f"a folder with space to write in; {reason(error)}") from None
            if not replicas.all_reduce_sum_(torch.tensor(must, device=device)):
                return False
            if not part.path.exists():
                raise BadInput(FLAG, self.folder, "a folder that all ranks share, to store a teacher's outputs")
            self._write_blocks(part, chunks, ask)
            replicas.all_reduce_sum_(torch.zeros(1, device=device))  # all ranks have written theirs
            if replicas.rank() == 0:
                part.finish(path)
                entries, size = int(layout.starts[-1]), layout.size / 2**20
                self.tell(f"teacher's outputs kept in {path}: {entries:,} tokens, {self.form}, {size:.1f} MiB")
            replicas.all_reduce_sum_(torch.zeros(1, device=device))
        return True

    def _write_blocks(self, part: Part, chunks: Iterable[Batch], ask: Ask) -> None:
        """Compute a rank's blocks that are missing; all ranks ask the teacher equally often, as it may be sharded."""
        rank, ranks, written = replicas.rank(), replicas.count(), part.written()
        for turn, chunk in enumerate(chunks):
            if all(written[turn * ranks : (turn + 1) * ranks]):
                continue
            block = turn * ranks + rank
            empty = not len(chunk.index)
            outputs = ask(_filler(chunk) if empty else chunk)
            if empty or written[block]:
                continue
            counts, first = label_mask(chunk.labels), int(part.layout.starts[block * part.layout.rows])
            part.write(block, self.form.reduce(outputs.logits[counts], part.layout.record, first))

    def rows(self, batch: Batch) -> Outputs:
        """Return the teacher's outputs for a batch's rows; zeros for tokens that do not count."""
        assert self.layout is not None
        assert self.entries is not None
        counts = label_mask(batch.labels)
        index, lengths = batch.index, counts.sum(1)
        if batch.texts is not None:  # of which a row has several, one after the other
            index, lengths = batch.texts[counts].unique_consecutive(return_counts=True)
        places = index.cpu().numpy()
        starts, stops = self.layout.starts[places], self.layout.starts[places + 1]
        if not np.array_equal(lengths.cpu().numpy(), stops - starts):
            raise BadInput("data", "a batch", "as many labels in each text as when the teacher's outputs were stored")
        parts = [self.entries[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return self.form.expand(np.concatenate([self.entries[:0], *parts]), counts)

    def reduce(self, outputs: Outputs, batch: Batch) -> Outputs:
        """Return a teacher's outputs for a batch as they would be read from the file."""
        counts = label_mask(batch.labels)
        record = self.form.record(self.classes, outputs.logits.dtype == torch.float64)
        return self.form.expand(self.form.reduce(outputs.logits[counts], record, 0), counts)

    def clear(self) -> None:
        self.entries = None


def _check_method(form: Form, flag: str, objective: Objective) -> None:
    method = type(objective).__name__
    if layers := [*objective.teacher_layers.values()]:
        expected = f"a method of probabilities alone beside --teacher_top_k; this one reads the layer {layers[0]}"
        raise BadInput(flag, method, f"{expected}, which is not stored")
    if share := max(getattr(part, "on_policy", 0.0) for part in objective.modules()):
        raise BadInput(f"{flag}.on_policy", share, "0 beside --teacher_top_k: the teacher has to score new texts")
    if form.k is None:
        return
    if any(getattr(part, "standardize", False) for part in objective.modules()):
        why = "it needs the logits of all tokens"
        raise BadInput(f"{flag}.standardize", True, f"--teacher_top_k all beside it: {why}")
    if form.tail not in objective.tails:
        takes = " or ".join([f"--teacher_tail {tail}" for tail in objective.tails] or ["--teacher_top_k all"])
        raise BadInput(flag, method, f"{takes} for this method, which can't learn from {form}")


def _filler(chunk: Batch) -> Batch:
    """Return a batch of one text in the place of one of none."""
    texts = chunk.inputs.new_zeros(1, max(*chunk.inputs.shape[1:], 1))
    return chunk._replace(inputs=texts, labels=torch.full_like(texts, IGNORED))


def _refuse_damaged(path: Path, intact: bool) -> None:
    if not intact:
        raise BadInput(FLAG, path, "a file whose entries have its checksums; it is damaged: delete it")


def _plain(record: np.dtype) -> list[Any]:
    """Return the fields of a record as JSON has them."""
    assert record.fields is not None
    return [[name, field[0].base.str, list(field[0].shape)] for name, field in record.fields.items()]


def digest_weights(net: nn.Module) -> str:
    """Hash the names, shapes and values of a net's weights, its class and the arguments that rebuild it.

    A `name` does not count: it may be a folder's, which can be moved.
    """
    rebuilt = net.rebuild_arguments(net.init_args) if isinstance(net, Recorded) else getattr(net, "init_args", {})
    arguments = {name: x for name, x in rebuilt.items() if name != "name"}
    digest = hashlib.blake2b(repr([type(net).__name__, sorted(arguments.items())]).encode(), digest_size=16)
    for name, x in sorted(net.state_dict().items()):
        digest.update(repr((name, tuple(x.shape), x.dtype)).encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
