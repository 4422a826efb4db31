"""The teacher of a distillation: a trained net, neither optimised nor saved, whose outputs may be stored."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import Batch
from apprentice.errors import BadInput, reason
from apprentice.weights import read_saved
from lit_modules.nets import Ensemble, Outputs, has_no_running_statistics, unwrap_logits
from lit_modules.nets.recorded import Spec, rebuild
from lit_modules.nets.stored import NoTeacher, StoredTeacher
from lit_modules.nets.weights import load_weights
from lit_modules.objectives import Objective
from lit_modules.objectives.base import OWN
from lit_modules.stored_teacher import Stored, TextStore, form_of

LEAST = 2**20  # bytes that are worth a line
LOGITS = ""  # their name in a file, which no layer has

Teacher = Callable[[Batch], Outputs]


def trained_teacher(teacher: nn.Module | Spec | None, weights: str | Path | None) -> nn.Module:
    """The frozen teacher, with weights of a file if one is given; BadInput for one that would have none."""
    if teacher is None:
        return NoTeacher()
    net: nn.Module = unwrap_logits(rebuild(teacher, "teacher"))
    if weights is not None:
        for line in load_weights(net, str(weights), "teacher_weights"):
            warnings.warn(f"{weights}: {line}", stacklevel=3)
    elif net is not teacher and not getattr(net, "is_trained", False):
        expected = "a trained net, or beside it teacher_weights=FILE: a checkpoint has no weights of the teacher"
        raise BadInput("teacher", type(net).__name__, expected)
    return net.requires_grad_(False).eval()


def leave_out_of_state(module: nn.Module) -> None:
    """Let a module's state dict not have the parameters of its `teacher`, nor ask for them."""
    module.register_state_dict_post_hook(_remove_teacher)
    module.register_load_state_dict_post_hook(_allow_missing_teacher)


def _remove_teacher(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}teacher.")]:
        del state[key]


def _allow_missing_teacher(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith("teacher.")]


class TeacherCache:
    """A frozen teacher's outputs for all training samples, stored for the time of a fit, and in files for other runs.

    Ranks compute chunks of fixed size and order and then share them, so a resumed run gets the same bits. A file is
    named by the teacher's weights, all inputs, and the bits of the outputs for the first of them, which tell what
    layers are read, how they are reduced, and the kernels of a machine. Runs may share the folder at any time.

    Attributes:
        outputs: by the sample's index; None if they are not stored.
        max_bytes: how many they may take on a rank.

    Args:
        teacher: the net, before a strategy shards it.
        max_mb: MiB that they may take on a rank.
        folder: where they are kept for other runs; None if nowhere.
        tell: prints a line, on one rank.
    """

    def __init__(
        self, teacher: nn.Module, max_mb: int, folder: str | Path | None, tell: Callable[[str], object]
    ) -> None:
        self.outputs: Outputs | None = None
        self.objectives: Mapping[str, Objective] = {}
        self.max_bytes, self.tell = max_mb * 2**20, tell
        self.folder = Path(folder).expanduser() if folder else None
        state = sorted(teacher.state_dict().items()) if folder else ()
        self._weights = [_digest(name.encode(), value) for name, value in state]

    @property
    def is_filled(self) -> bool:
        return self.outputs is not None

    def check(self, objectives: Mapping[str, Objective]) -> None:
        """Keep the objectives, of which it says who reads how much."""
        self.objectives = objectives

    def is_wanted(self, data: Any, epochs: float) -> bool:
        """Whether inputs come again, so that outputs are worth storing."""
        return bool(getattr(data, "train_inputs_repeat", False) and self.max_bytes and epochs > 1)

    def fill(self, data: Any, teacher: Teacher, trainer: Trainer) -> int:
        """Compute or read the outputs for a data module's training set; say so if they take too much.

        Returns for how many samples they were computed.
        """
        use_files = replicas.count() == trainer.world_size

        def chunks() -> Iterator[Batch]:
            in_order = data.train_in_order(replicas.rank(), replicas.count())
            return (data.on_after_batch_transfer(chunk, 0) for chunk in in_order)

        samples: int = data.sizes["train"]
        if self.folder is not None and use_files:
            self.outputs = self._read_or_compute(self.folder, chunks, samples, teacher)
        else:
            self.outputs = self._compute(chunks(), samples, teacher)
        if self.outputs is None:
            self.tell(f"teacher's outputs are not stored: they take more than {self.max_bytes / 2**20:g} MiB")
        elif by_readers := describe_sizes(self.outputs, self.objectives):
            self.tell(f"teacher's outputs stored: {by_readers}")
        return samples

    def rows(self, batch: Batch) -> Outputs:
        """Return the outputs for a batch's rows."""
        assert self.outputs is not None
        return self.outputs.map(lambda x: x[batch.index])

    def reduce(self, outputs: Outputs, _batch: Batch) -> Outputs:
        """Return the teacher's outputs for a batch as `rows` would."""
        return outputs

    def clear(self) -> None:
        self.outputs = None

    def _compute(self, chunks: Iterable[Batch], samples: int, teacher: Teacher) -> Outputs | None:
        store: Outputs | None = None
        for chunk in chunks:
            outputs = teacher(chunk)
            if store is None and (store := self._empty(outputs, samples)) is None:
                return None
            for whole, x in zip(store.tensors(), outputs.tensors(), strict=True):
                whole[chunk.index] = x
        return store and store.map(replicas.all_reduce_sum_)

    def _empty(self, outputs: Outputs, samples: int) -> Outputs | None:
        """Zeros for all samples, shaped as a chunk's outputs, which may have no rows; None for too many bytes."""
        row_bytes = sum(x.new_empty(1, *x.shape[1:]).nbytes for x in outputs.tensors())
        if row_bytes * samples > self.max_bytes:
            return None
        return outputs.map(lambda x: x.new_zeros(samples, *x.shape[1:]))

    def _read_or_compute(
        self, folder: Path, chunks: Callable[[], Iterable[Batch]], samples: int, teacher: Teacher
    ) -> Outputs | None:
        """A file that is damaged, or can't be written, is told in a line and changes no result."""
        inputs, first, empty = 0, 0, None
        for number, chunk in enumerate(chunks()):
            if len(chunk.index):  # ranks get their chunks in turn, and the last perhaps none
                inputs += _digest(b"", chunk.index, chunk.inputs)
            if number == 0:
                few = teacher(chunk)
                first = _digest(repr(list(few.features)).encode(), *few.tensors()) if not replicas.rank() else 0
                empty = self._empty(few, samples)
        if empty is None:
            return None
        device, words = empty.logits.device, 2**32
        halves = [inputs % words, inputs // words % words, first % words, first // words]
        low, high, *outputs = replicas.all_reduce_sum_(torch.tensor(halves, device=device)).tolist()
        everything = [self._weights, (low + high * words) % words**2, outputs]
        path = folder / f"teacher-{hashlib.blake2b(repr(everything).encode(), digest_size=16).hexdigest()}.pt"
        is_there = torch.zeros(1, device=device)
        if replicas.rank() == 0 and self._load(path, empty):
            is_there += 1
        if replicas.all_reduce_sum_(is_there):
            self.tell(f"teacher's outputs read from {path}")
            return empty.map(replicas.all_reduce_sum_)
        computed = self._compute(chunks(), samples, teacher)
        if replicas.rank() == 0 and computed is not None:
            self._save(path, computed)
        return computed

    def _load(self, path: Path, store: Outputs) -> bool:
        """Whether a file filled the store."""
        if not path.exists():
            return False
        try:
            saved = read_saved(path, "teacher_cache_dir")
        except BadInput as error:
            self.tell(f"teacher's outputs are computed anew: {error}")
            return False
        for name, x in _named(store).items():
            x.copy_(saved[name])
        return True

    def _save(self, path: Path, outputs: Outputs) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")  # another run may write the same
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({name: x.cpu() for name, x in _named(outputs).items()}, temporary)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch's own for a full disk
            self.tell(f"teacher's outputs are not kept in {path.parent}: {reason(error)}")
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        else:
            self.tell(f"teacher's outputs kept in {path}")


def _named(outputs: Outputs) -> dict[str, Tensor]:
    return {LOGITS: outputs.logits, **outputs.features}


def _digest(start: bytes, *tensors: Tensor) -> int:
    """64 bits of a hash of tensors with their shapes and types."""
    digest = hashlib.blake2b(start, digest_size=8)
    for x in tensors:
        digest.update(repr((tuple(x.shape), x.dtype)).encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def describe_sizes(stored: Outputs, objectives: Mapping[str, Objective]) -> str:
    """The size of all outputs, and of features by the students that read them: `12.3 MiB; 3.4 for at, sp`.

    Empty if little is stored, or logits alone.
    """
    bytes_by_readers: dict[tuple[str, ...], int] = {}
    for path, x in stored.features.items():
        names = tuple(name for name, objective in objectives.items() if _reads(name, objective, path, stored))
        bytes_by_readers[names] = bytes_by_readers.get(names, 0) + x.nbytes
    total = stored.logits.nbytes + sum(bytes_by_readers.values())
    if not bytes_by_readers or total < LEAST:
        return ""
    parts = [f"{size / 2**20:.1f} for {', '.join(names)}" for names, size in bytes_by_readers.items()]
    return "; ".join([f"{total / 2**20:.1f} MiB", *parts])


def _reads(name: str, objective: Objective, path: str, stored: Outputs) -> bool:
    """Whether a student reads a feature: one that its objective condensed, or a raw one that it did not."""
    if OWN in path:
        return path.startswith(f"{name}{OWN}")
    raw = path in objective.teacher_layers.values() and f"{name}{OWN}{path}" not in stored.features
    return raw and objective.uses_teacher


def make_cache(
    teacher: nn.Module, objectives: Mapping[str, Objective], classes: int, tell: Callable[[str], object], max_mb: int,
    folder: str | Path | None, stored: Stored | None,
) -> TeacherCache | TextStore:  # fmt: skip
    """Make it; BadInput for flags that can't be used, or a teacher that can't be stored."""
    if stored is None:
        if isinstance(teacher, StoredTeacher):
            raise BadInput("teacher", type(teacher).__name__, "what was stored of it beside it")
        return TeacherCache(teacher, max_mb, folder, tell)
    if folder is None:
        raise BadInput("teacher_top_k", stored.top_k, "--teacher_cache_dir DIR beside it, where outputs are kept")
    depends = any(map(has_no_running_statistics, teacher.modules()))
    if isinstance(teacher, Ensemble) or depends:
        why = "depend on the batch, by its statistics" if depends else "are the mean of several, which is not stored"
        raise BadInput("teacher_top_k", stored.top_k, f"a teacher whose outputs can be stored; this one's {why}")
    return TextStore(teacher, folder, form_of(stored, objectives, classes), classes, stored.source, tell)
