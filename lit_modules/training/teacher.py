"""The teacher of a distillation: a trained net, neither optimised nor saved, whose outputs may be stored."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from apprentice import replicas
from apprentice.batch import Batch
from apprentice.errors import BadInput, reason
from lit_modules.nets.base import unwrap_logits
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.identity import identify
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.specs import Spec, rebuild
from lit_modules.nets.stored import NoTeacher
from lit_modules.nets.weights import load_weights
from lit_modules.objectives.base import Objective
from lit_modules.training.tensor_folder import TensorFolder, add_hashes, hash_tensors
from lit_modules.training.whole_outputs import ForwardRequest

if TYPE_CHECKING:
    from lit_modules.distillation import Distillation

LEAST = 2**20  # bytes that are worth a line

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


def layers_read(teacher: nn.Module, objectives: Mapping[str, Objective]) -> set[str]:
    """Return the layers of a teacher that objectives read."""
    members = teacher.member_layers if isinstance(teacher, Ensemble) else ()
    return {*members, *(path for o in objectives.values() for path in o.teacher_layers.values())}


def exclude_teacher_from_state_dict(module: nn.Module) -> None:
    """Let a module's state dict not have the parameters of its `teacher`, nor ask for them."""
    module.register_state_dict_post_hook(_remove_teacher)
    module.register_load_state_dict_post_hook(_allow_missing_teacher)


def _remove_teacher(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}teacher.")]:
        del state[key]


def _allow_missing_teacher(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith("teacher.")]


class TeacherOutputs(Protocol):
    """A frozen teacher's outputs for a training set, computed once: the port."""

    @property
    def folder(self) -> Path | None:
        """Where they are kept for other runs; None if nowhere."""

    @property
    def is_filled(self) -> bool:
        """Whether the teacher need not run."""

    def set_objectives(self, objectives: Mapping[str, Objective]) -> None:
        """Take the objectives that read them; BadInput for one that can't."""

    def is_wanted(self, data: Any, epochs: float) -> bool:
        """Return whether outputs are worth storing for so many epochs; BadInput for data of which they can't be."""

    def fill(self, data: Any, teacher: Teacher, trainer: Trainer) -> int:
        """Compute or read them; return for how many samples they were computed."""

    def rows(self, batch: Batch) -> Outputs:
        """Return the outputs for a batch's rows."""

    def reduce(self, outputs: Outputs, batch: Batch) -> Outputs:
        """Return a teacher's outputs for a batch as `rows` would."""

    def clear(self) -> None:
        """Free them."""


def store_outputs(module: "Distillation", epochs: float, batch_norm: str | None) -> None:
    """Store the teacher's outputs for all samples if they are needed again, in so many epochs; or say why not.

    `batch_norm` is the path of a layer by which they depend on the batch, if there is one.
    """
    cache, trainer = module.cache, module.trainer
    data: Any = getattr(trainer, "datamodule", None)
    if not cache.is_wanted(data, epochs):
        if cache.folder is not None:
            why = "no input comes again as it is, or none are to be stored"
            module.print(f"teacher's outputs are not kept in {cache.folder}: {why}")
        return
    if batch_norm is not None:
        name = batch_norm or type(module.teacher).__name__
        module.print(f"teacher's outputs are not stored: they depend on the batch, by its statistics in {name}")
        return

    def ask(chunk: Batch) -> Outputs:
        beside = module.outputs.beside(chunk._replace(starts=None))
        outputs: Outputs = module(chunk.inputs, *beside, request=ForwardRequest(True, ()))[0]
        return outputs

    with trainer.precision_plugin.forward_context(), torch.no_grad():
        computed = cache.fill(data, ask, trainer)
    if cache.is_filled:
        module.teacher_samples, module.teacher_stored = max(module.teacher_samples, computed), True


class KeptOutputs:
    """Outputs for all training samples in memory, which a batch's rows are taken from by their places.

    Attributes:
        outputs: by the sample's index; None if they are not stored.
        objectives: those that read them.
    """

    def __init__(self) -> None:
        self.outputs: Outputs | None = None
        self.objectives: Mapping[str, Objective] = {}

    @property
    def is_filled(self) -> bool:
        return self.outputs is not None

    def set_objectives(self, objectives: Mapping[str, Objective]) -> None:
        self.objectives = objectives

    def rows(self, batch: Batch) -> Outputs:
        """Return the outputs for a batch's rows."""
        assert self.outputs is not None
        return self.outputs.map(lambda x: x[batch.index])

    def reduce(self, outputs: Outputs, _batch: Batch) -> Outputs:
        """Return the teacher's outputs for a batch as `rows` would."""
        return outputs

    def clear(self) -> None:
        self.outputs = None


class TeacherCache(KeptOutputs):
    """A frozen teacher's outputs for all training samples, stored for the time of a fit, and in files for other runs.

    Ranks compute chunks of fixed size and order and then share them, so a resumed run gets the same bits. A folder is
    named by what the teacher computes (`identify`), all inputs, and the bits of the outputs for the first of them,
    which tell what layers are read, how they are reduced, and the kernels of a machine. Runs may share the folder at
    any time.

    Attributes:
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
        super().__init__()
        self.max_bytes, self.tell = max_mb * 2**20, tell
        self.folder = Path(folder).expanduser() if folder else None
        self._identity = identify(teacher) if folder else ""

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
        self, parent: Path, chunks: Callable[[], Iterable[Batch]], samples: int, teacher: Teacher
    ) -> Outputs | None:
        """A file that is damaged, or can't be written, is told in a line and changes no result."""
        inputs, first, empty = 0, 0, None
        for number, chunk in enumerate(chunks()):
            if len(chunk.index):  # ranks get their chunks in turn, and the last perhaps none
                of_texts = (chunk.labels,) if chunk.labels.dim() > 1 else ()  # they say where a text ends
                inputs += hash_tensors(chunk.index, chunk.inputs, *of_texts)
            if number == 0:
                few = teacher(chunk)
                named = few.named()
                first = hash_tensors(*named.values(), start=repr([*named]).encode()) if not replicas.rank() else 0
                empty = self._empty(few, samples)
        if empty is None:
            return None
        device = empty.logits.device
        of_inputs, of_outputs = add_hashes(inputs, first, device=device)
        facts = {"teacher": self._identity, "inputs": of_inputs, "first outputs": of_outputs}
        folder = TensorFolder(parent, "outputs", facts)
        is_there = torch.zeros(1, device=device)
        if replicas.rank() == 0 and self._load(folder, empty):
            is_there += 1
        if replicas.all_reduce_sum_(is_there):
            self.tell(f"teacher's outputs read from {folder.path}")
            return empty.map(replicas.all_reduce_sum_)
        computed = self._compute(chunks(), samples, teacher)
        if replicas.rank() == 0 and computed is not None:
            self._save(folder, computed)
        return computed

    def _load(self, folder: TensorFolder, store: Outputs) -> bool:
        """Whether a file filled the store."""
        if not folder.is_whole:
            folder.tell_of_older(self.tell)
            return False
        try:
            saved = folder.read(0)
        except BadInput as error:
            self.tell(f"teacher's outputs are computed anew: {error}")
            return False
        for name, x in store.named().items():
            x.copy_(saved[name])
        return True

    def _save(self, folder: TensorFolder, outputs: Outputs) -> None:
        try:
            folder.write(0, outputs.named())
            folder.finish([0], {})
        except (BadInput, OSError) as error:
            why = error.expected if isinstance(error, BadInput) else reason(error)
            self.tell(f"teacher's outputs are not kept in {folder.path.parent}: {why}")
        else:
            self.tell(f"teacher's outputs kept in {folder.path}")


def describe_sizes(stored: Outputs, objectives: Mapping[str, Objective]) -> str:
    """The size of all outputs, and of features by the students that read them: `12.3 MiB; 3.4 for at, sp`.

    Empty if little is stored, or logits alone.
    """
    bytes_by_readers: dict[tuple[str, ...], int] = {}
    of_all = {path: tuple(n for n, o in objectives.items() if _reads(n, o, path, stored)) for path in stored.features}
    readers = [*of_all.values(), *((path[0],) for path in stored.condensed)]
    for names, x in zip(readers, [*stored.features.values(), *stored.condensed.values()], strict=True):
        bytes_by_readers[names] = bytes_by_readers.get(names, 0) + x.nbytes
    total = stored.logits.nbytes + sum(bytes_by_readers.values())
    if not bytes_by_readers or total < LEAST:
        return ""
    parts = [f"{size / 2**20:.1f} for {', '.join(names)}" for names, size in bytes_by_readers.items()]
    return "; ".join([f"{total / 2**20:.1f} MiB", *parts])


def _reads(name: str, objective: Objective, path: str, stored: Outputs) -> bool:
    """Whether a student reads a raw feature, which its objective has not condensed."""
    return path in objective.teacher_layers.values() and (name, path) not in stored.condensed and objective.uses_teacher
