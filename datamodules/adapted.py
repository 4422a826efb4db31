"""Any LightningDataModule of (inputs, labels), read so that the suite's promises hold for it too."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from apprentice.batch import Batch
from apprentice.errors import BadInput
from apprentice.keyed import fold_in, with_seed
from datamodules.base import LIMITS, InMemoryData
from datamodules.fingerprints import Fingerprint
from datamodules.loaders import EpochOrder, no_loaders
from datamodules.splits import Split
from datamodules.streams import quiet_worker

Loader: TypeAlias = Any  # a DataLoader, or what else gives batches (inputs, labels) and has a length
READ = 32  # samples of a part that are read for a fingerprint
PARTS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}


class Adapted(InMemoryData):
    """A LightningDataModule of another's: its batches are global, and each rank reads its rows of them.

    So `batch_size` counts samples over all devices, and none is read twice. Where a loader is torch's DataLoader of an
    indexed data set, its sampler, and what its data set draws from torch's, numpy's and Python's global generators,
    depend on the training seed, the epoch and the sample alone: neither devices, workers nor a resume move a number.
    Any other loader is read whole by each rank, which a line says; then its own order is as exact as it is.

    Without `test_dataloader`, `val_dataloader` is tested on and nothing is validated; a line says so.

    Args:
        data: the data module. Its hooks before and after the transfer of a batch are called.
        num_classes: the number of classes; default: its attribute `num_classes`, or that of its hyperparameters.

    Raises:
        BadInput: the number of classes is not known, or a loader does not give (inputs, labels).
    """

    def __init__(self, data: LightningDataModule, num_classes: int | None = None) -> None:
        super().__init__(validation_size=0)
        self.data, self.name = data, type(data).__name__
        self.prepare_data_per_node = data.prepare_data_per_node
        self._classes, self._loaders = num_classes, dict[str, Loader]()

    def prepare_data(self) -> None:
        """As the data module does."""
        if not self._loaders:
            self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set the data module up, and read the first training batch; later calls, also in forked ranks, do nothing."""
        if self._loaders:
            return
        for part in ("fit", "test"):  # seeded: a split without a generator is the same in each process and resume
            with_seed(self.seed, partial(self.data.setup, part))
        parts = {part: hook for part, hook in PARTS.items() if is_overridden(hook, self.data, LightningDataModule)}
        if "test" not in parts and "validation" in parts:
            parts = {"train": parts.get("train", ""), "test": parts["validation"]}
            self.say("it has no test_dataloader(): tests on val_dataloader(), validates on nothing")
        if missing := next((part for part in ("train", "test") if not parts.get(part)), None):
            raise BadInput("data", self.name, f"a data module with {PARTS[missing]}()")
        self._loaders = {part: self._loader(hook) for part, hook in parts.items()}
        for part, loader in self._loaders.items():
            if not _indexed(loader):
                whole = f"{parts[part]}() gives no DataLoader of an indexed data set, so each device reads all of it"
                self.say(f"{whole}; whether runs repeat, and resume within an epoch, depends on its order")
        first = next(_read(self._loaders["train"], self.seed, [(0, torch.arange)]))
        inputs, labels = self._hooked(first.inputs, first.labels)
        self.batch_size, self._dtype = len(labels), inputs.dtype
        self.input_shape = tuple(inputs.shape[1:])
        known = getattr(self.data, "num_classes", self.data.hparams.get("num_classes"))
        classes = self._classes or known
        if not isinstance(classes, int) or classes < 2:
            raise BadInput("num_classes", classes, f"the number of classes, at least 2; {self.name} does not say")
        if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            found = f"the first batch has {int(labels.min())} to {int(labels.max())}"
            raise BadInput("num_classes", classes, f"labels from 0 to {classes - 1}; {found}")
        names = getattr(self.data, "class_names", None) or getattr(self.data, "classes", None)
        usable = isinstance(names, Sequence) and len(names) == classes
        self.class_names = tuple(map(str, names if usable else range(classes)))  # type: ignore[arg-type]

    def _loader(self, hook: str) -> Loader:
        loader = getattr(self.data, hook)()
        if isinstance(loader, list | tuple) and len(loader) == 1:
            loader = loader[0]
        if not hasattr(loader, "__iter__") or isinstance(loader, list | tuple | dict | CombinedLoader):
            raise BadInput("data", self.name, f"one loader from {hook}(); it gives {type(loader).__name__}")
        try:
            len(loader)
        except TypeError:
            raise BadInput("data", self.name, f"a loader with a length from {hook}()") from None
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            expected = f"a loader without a DistributedSampler from {hook}(): each device reads its rows of a batch"
            raise BadInput("data", self.name, expected)
        return loader

    def _hooked(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A pair as the data module's hooks make it."""
        return _pair(self.data.on_after_batch_transfer(self.data.on_before_batch_transfer((inputs, labels), 0), 0))

    def _batch_size(self, part: str) -> int:
        return getattr(self._loaders.get(part), "batch_size", None) or self.batch_size

    def _count(self, part: str) -> int:
        if not self._loaders:
            self.prepare_data()
            self.setup()
        if part not in self._loaders:
            return 0
        loader = self._loaders[part]
        most = len(loader) * self._batch_size(part)
        return min(len(loader.sampler), most) if _indexed(loader) and loader.batch_size else most

    @property
    def places(self) -> int:
        """Places that a training batch's `index` counts."""
        self.sizes  # noqa: B018 - set up
        loader = self._loaders["train"]
        return len(loader.dataset) if _indexed(loader) else self.sizes["train"]

    def samples(self, part: str, chosen: Tensor, dtype: torch.dtype | None = None) -> Split:
        """The samples at these (k,) places in the order of a loader as it is for `seed`, normalised."""
        self.sizes  # noqa: B018 - set up
        loader, read = self._loaders[part], list[tuple[Tensor, Tensor]]()
        if _indexed(loader):
            order = torch.tensor([place for batch in _batches(loader, self.seed) for place in batch])
            read = [_pair(next(_fetched(loader, self.seed, [order[chosen].tolist()])))]
            chosen = torch.arange(len(chosen))
        else:
            batches = iter(loader)
            while sum(len(labels) for _, labels in read) <= int(chosen.max()):
                read.append(_pair(next(batches)))
        inputs, labels = (torch.cat(each)[chosen] for each in zip(*read, strict=True))
        inputs, labels = self._hooked(inputs, labels)
        return Split(self.normalize(inputs, dtype), labels)

    def fingerprint(self) -> Fingerprint:
        """What the data module's own `fingerprint()` says, a text, if it has one.

        Otherwise of each part how many samples there are, and of `READ` samples labels and means of inputs. What
        differs when it is read again, as an augmentation by a generator of the data set's own, does not count.
        """
        if callable(own := getattr(self.data, "fingerprint", None)):
            return {"all": own()}
        return {part: {"samples": count, **self._few(part, count)} for part, count in self.sizes.items() if count}

    def _few(self, part: str, count: int) -> dict[str, list[float] | None]:
        few = min(READ, count)
        places = torch.arange(few) * (count // few if _indexed(self._loaders[part]) else 1)  # or all before are read
        once, again = (with_seed(self.seed, lambda: self.samples(part, places)) for _ in range(2))
        means, others = (found.inputs.double().flatten(1).mean(1).tolist() for found in (once, again))
        labels = once.labels.tolist()
        return {
            "labels": labels if labels == again.labels.tolist() else None,
            "means": means if means == others else None,
        }

    @property
    def train_inputs_repeat(self) -> bool:
        """Not known, so a teacher runs for every batch."""
        return False

    @property
    def example(self) -> Tensor:
        """(2, ...), inputs as a net takes them, of zeros."""
        return self.normalize(torch.zeros(2, *self.input_shape, dtype=self._dtype))

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Floats of the `dtype`; whole numbers as they are."""
        return inputs.to(dtype or torch.get_default_dtype()) if inputs.is_floating_point() else inputs

    def train_dataloader(self) -> "SharedLoader":  # type: ignore[override]
        """The loader's batches in the order of (order_seed, epoch), each cut into contiguous shares for the ranks."""
        rank, replicas = self._place()
        self.check_replicas(replicas, getattr(self.trainer and self.trainer.strategy, "exact", None))
        self.data.trainer = self.trainer
        return SharedLoader(self._loaders["train"], self._order(self.sizes["train"]), rank, replicas)

    def val_dataloader(self) -> "DealtLoader | CombinedLoader":  # type: ignore[override]
        """The validation batches, each on one rank; no loader if there are none."""
        return self._dealt("validation") if "validation" in self._loaders else no_loaders()

    def test_dataloader(self) -> "DealtLoader":  # type: ignore[override]
        """The test batches, each on one rank; a Trainer's limit counts those of all ranks."""
        return self._dealt("test")

    def predict_dataloader(self) -> "DealtLoader":  # type: ignore[override]
        """The test batches, for `trainer.predict`."""
        return self._dealt("test")

    def _dealt(self, part: str) -> "DealtLoader":
        self.data.trainer = self.trainer
        kept = math.ceil(self._kept(part, self.trainer) / self._batch_size(part))
        if isinstance(getattr(self.trainer, LIMITS[part], None), float):  # Lightning would apply it again
            setattr(self.trainer, LIMITS[part], kept)
        return DealtLoader(self._loaders[part], kept, *self._place(), self.seed)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Lightning's hook: as the data module does."""
        inputs, labels = _pair(self.data.on_before_batch_transfer((batch.inputs, batch.labels), dataloader_idx))
        return batch._replace(inputs=inputs, labels=labels)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Lightning's hook, on the device: as the data module does; floats get the module's type."""
        pair = self.data.on_after_batch_transfer((batch.inputs, batch.labels), dataloader_idx)
        inputs, labels = _pair(pair)
        return super().on_after_batch_transfer(batch._replace(inputs=inputs, labels=labels), dataloader_idx)

    def teardown(self, stage: str) -> None:
        """As the data module does."""
        self.data.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        """The data module's."""
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The data module's."""
        self.data.load_state_dict(state_dict)


class SharedLoader:
    """A rank's rows of each of a loader's batches, in the order of an epoch."""

    def __init__(self, loader: Loader, order: EpochOrder, rank: int, replicas: int) -> None:
        self.loader, self.sampler, self.rank, self.replicas = loader, order, rank, replicas

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.sampler.epoch, self.sampler.start()

        def share(count: int) -> Tensor:
            return self.sampler.share(0, count, self.rank, self.replicas)

        parts = _read(self.loader, self.sampler.key, [(number, share) for number in range(start, len(self))])
        for step, part in enumerate(parts, epoch * len(self) + start):
            yield Batch(part.inputs, part.labels, part.index, part.rows, part.count, self.replicas, step)

    # Without these two Lightning warns when it resumes in mid-epoch.
    def state_dict(self) -> dict:
        """Empty, as the order follows from seed and epoch."""
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        """Nothing to do."""


class DealtLoader:
    """The first `kept` of a loader's batches, dealt to the ranks in turn: batch c goes to rank c % replicas.

    Every rank gets the same number of batches, the last perhaps empty. A batch stands for itself, as in `ChunkLoader`.
    """

    def __init__(self, loader: Loader, kept: int, rank: int, replicas: int, key: int) -> None:
        self.loader, self.kept, self.rank, self.replicas, self.key = loader, kept, rank, replicas, key

    def __len__(self) -> int:
        return math.ceil(self.kept / self.replicas)

    def __iter__(self) -> Iterator[Batch]:
        numbers = range(self.rank, len(self) * self.replicas, self.replicas)
        wanted = [(number, torch.arange) if number < self.kept else (self.kept - 1, _none) for number in numbers]
        for part in _read(self.loader, self.key, wanted):
            yield Batch(part.inputs, part.labels, part.index, part.rows, max(len(part.rows), 1), 1, 0)


Rows: TypeAlias = Callable[[int], Tensor]  # of a batch of so many, those that are wanted


class Part(NamedTuple):
    """Some rows of a batch of `count`."""

    inputs: Tensor
    labels: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    rows: Tensor
    count: int  # type: ignore[assignment]


def _none(_: int) -> Tensor:
    return torch.arange(0)


def _read(loader: Loader, key: int, wanted: Sequence[tuple[int, Rows]]) -> Iterator[Part]:
    """The wanted rows of the batches of these numbers, which don't decrease."""
    if not _indexed(loader):
        batches, first, found, at = iter(loader), 0, (torch.empty(0), torch.empty(0)), -1
        for number, choose in wanted:
            while at < number:
                first += len(found[1])
                found, at = _pair(next(batches)), at + 1
            rows, count = choose(len(found[1])), len(found[1])
            yield Part(found[0][rows], found[1][rows], rows + first, rows, count)
        return
    wholes = _batches(loader, key)
    chosen = [choose(len(wholes[number])) for number, choose in wanted]
    places = [torch.tensor(wholes[number]) for number, _ in wanted]
    # A data set may not be able to give no samples: for their shape, one is read.
    lists = [(whole[rows] if len(rows) else whole[:1]).tolist() for whole, rows in zip(places, chosen, strict=True)]
    for whole, rows, batch in zip(places, chosen, _fetched(loader, key, lists), strict=True):
        inputs, labels = _pair(batch)
        yield Part(inputs[: len(rows)], labels[: len(rows)], whole[rows], rows, len(whole))


def _indexed(loader: Loader) -> bool:
    """Whether its batches are lists of places in a data set."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _batches(loader: DataLoader, key: int) -> list[list[int]]:
    """The places of all batches of an epoch, as its sampler draws them from global generators, or from its own."""
    own = getattr(loader.sampler, "generator", None)
    if own is not None:
        own.manual_seed(key)
    return with_seed(key, lambda: list(loader.batch_sampler))  # type: ignore[arg-type]


def _fetched(loader: DataLoader, key: int, batches: list[list[int]]) -> Iterator[Any]:
    """These batches, by the loader's workers."""
    changed = copy.copy(loader)
    # A DataLoader lets none of these be assigned.
    vars(changed).update(
        dataset=_Keyed(loader.dataset, key), batch_sampler=batches, generator=torch.Generator(), _iterator=None,
        worker_init_fn=loader.worker_init_fn or quiet_worker,
    )  # fmt: skip
    return iter(changed)


class _Keyed(Dataset):
    """A data set in which what a sample draws depends on the key and its place alone."""

    def __init__(self, dataset: Dataset, key: int) -> None:
        self.dataset, self.key = dataset, key

    def __getitem__(self, place: int) -> Any:
        return with_seed(fold_in(self.key, place), lambda: self.dataset[place])


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    """The (inputs (n, ...), labels (n,) int64) of a batch; BadInput if it is none."""
    inputs, labels = batch if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor) or labels.dim() != 1 or _fractions(labels):
        kinds = ", ".join(map(_kind, batch)) if isinstance(batch, list | tuple) else _kind(batch)
        raise BadInput("data", kinds, "batches of two tensors, inputs (n, ...) and labels (n,) of whole numbers")
    return inputs, labels.long()


def _fractions(labels: Tensor) -> bool:
    return labels.is_floating_point() or labels.is_complex()


def _kind(found: Any) -> str:
    return f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
