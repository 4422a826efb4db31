"""A wrapper for any LightningDataModule of (inputs, labels), with which a run repeats on any number of devices."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DistributedSampler

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules.base import InMemoryData
from datamodules.data_hooks import LIMITS
from datamodules.fingerprints import Fingerprint
from datamodules.shared_loaders import (
    Loader,
    RoundRobinLoader,
    SharedLoader,
    class_names_of,
    fetch_batches,
    is_indexed,
    read_pair,
    read_rows,
    read_samples,
    unpack_pair,
)
from datamodules.splits import FLOAT_TASKS, REGRESSION, Split, scale_of

IMAGES = 4  # dimensions of a batch of images
READ = 32  # samples of a part that are read for a fingerprint
PARTS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}


class DataModuleAdapter(InMemoryData):
    """Wraps a user's LightningDataModule: its batches become global, and each rank reads its rows of them.

    `batch_size` then counts samples over all devices, and no sample is read twice. Where a loader is torch's DataLoader
    of an indexed data set, its sampler, and what its data set draws from torch's, numpy's and Python's global
    generators, depend on the training seed, the epoch and the sample alone: neither devices, workers nor a resume move
    a number.
    Any other loader is read whole by each rank, which a line says; then its own order is as exact as it is.

    Without `test_dataloader`, `val_dataloader` is tested on and nothing is validated; a line says so.

    Args:
        data: the data module. Its hooks before and after the transfer of a batch are called.
        num_classes: the number of classes; default: its attribute `num_classes`, or that of its hyperparameters. Its
            attribute `task`, if it has one, may be `multilabel` or `regression`: then labels are (n, C) numbers.

    Raises:
        BadInput: the number of classes is not known; a loader gives no batch, or not (inputs, labels) with a class for
            each sample, or images that are no floats or of several sizes; data sets number their classes in two ways.
    """

    train_inputs_repeat = False  # that is not known, so a teacher runs for every batch

    def __init__(self, data: LightningDataModule, num_classes: int | None = None) -> None:
        super().__init__(validation_size=0)
        self.data, self.name = data, type(data).__name__
        self.task = str(getattr(data, "task", self.task))
        self.prepare_data_per_node = data.prepare_data_per_node
        self._scale: tuple[Tensor, Tensor] | None = None
        self._classes, self._loaders = num_classes, dict[str, Loader]()

    def prepare_data(self) -> None:
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
            if not is_indexed(loader):
                whole = f"{parts[part]}() gives no DataLoader of an indexed data set, so each device reads all of it"
                self.say(f"{whole}; whether runs repeat, and resume within an epoch, depends on its order")
        self._check_class_names()
        firsts = {part: self._first_batch(part, parts[part]) for part in self._loaders}
        inputs, labels = firsts["train"]
        self.batch_size, self._dtype = len(labels), inputs.dtype
        self.input_shape = tuple(inputs.shape[1:])
        known = getattr(self.data, "num_classes", self.data.hparams.get("num_classes"))
        classes = self._classes or known or (labels.shape[1] if self.task == REGRESSION else None)
        least = 1 if self.task == REGRESSION else 2
        if not isinstance(classes, int) or classes < least:
            unknown = f"; {self.name} does not say" if classes is None else ", each with a logit"
            raise BadInput("num_classes", classes, f"the number of classes, at least 2{unknown}")
        names = getattr(self.data, "class_names", None) or getattr(self.data, "classes", None)
        is_usable = isinstance(names, Sequence) and len(names) == classes
        self.class_names = tuple(map(str, names if is_usable and names else range(classes)))
        for part, (inputs, labels) in firsts.items():
            self._check_batch(inputs, labels, "the first batch" + f" of {parts[part]}()" * (part != "train"))

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

    def _check_class_names(self) -> None:
        """Raise BadInput if the data sets of two loaders number their classes, by name, in two ways."""
        names = {part: class_names_of(loader) for part, loader in self._loaders.items()}
        for part, classes in names.items():
            if classes and names["train"] and classes != names["train"]:
                expected = f"data sets with the same classes in the same order; {part} has {', '.join(classes)}"
                raise BadInput("data", self.name, f"{expected} and train {', '.join(names['train'])}")

    def _first_batch(self, part: str, hook: str) -> tuple[Tensor, Tensor]:
        """The first batch of a part, after the hooks; BadInput if there is none, or of images that are no floats."""
        if not len(self._loaders[part]):
            expected = f"a batch or more from {hook}(), which gives none; drop_last leaves out all of a small set"
            raise BadInput("data", self.name, expected)
        first = next(read_rows(self._loaders[part], self.seed, [(0, torch.arange)]))
        inputs, labels = self._call_hooks(first.inputs, first.labels)
        if inputs.dim() == IMAGES and not inputs.is_floating_point():
            kind = str(inputs.dtype).removeprefix("torch.")
            raise BadInput("data", self.name, f"images of floats, as ToTensor makes them; {hook}() gives {kind}")
        return inputs, labels

    def _check_batch(self, inputs: Tensor, labels: Tensor, where: str) -> None:
        """Raise BadInput if a batch has labels that are no class, or images of another size than the first."""
        if self.task in FLOAT_TASKS:
            self._check_size(inputs, where)
            return
        least, most = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if not 0 <= least <= most < self.num_classes:
            expected = f"labels from 0 to {self.num_classes - 1}; {where} has {least} to {most}"
            raise BadInput("num_classes", self.num_classes, expected)
        self._check_size(inputs, where)

    def _check_size(self, inputs: Tensor, where: str) -> None:
        """Raise BadInput if a batch has images of another size than the first."""
        if inputs.dim() == IMAGES and tuple(inputs.shape[1:]) != self.input_shape:
            sizes = f"{where} has {tuple(inputs.shape[1:])}, and the first of training {self.input_shape}"
            raise BadInput("data", self.name, f"images of one size; {sizes}")

    def _call_hooks(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A pair as the data module's hooks make it."""
        return self._unpack(
            self.data.on_after_batch_transfer(self.data.on_before_batch_transfer((inputs, labels), 0), 0)
        )

    def _unpack(self, pair: Any) -> tuple[Tensor, Tensor]:
        return unpack_pair(pair, self.task, self.num_classes or None)

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
        return min(len(loader.sampler), most) if is_indexed(loader) and loader.batch_size else most

    @property
    def label_scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation (D,) of the numbers that train, which are read once."""
        if self._scale is None:
            chunks = torch.arange(self.sizes["train"]).split(READ)
            self._scale = scale_of(torch.cat([self.samples("train", chunk).labels for chunk in chunks]))
        return self._scale

    def source_of(self, part: str) -> str:
        return part

    def rows_of(self, part: str) -> Tensor:
        """The places in a loader's data set; BadInput for a loader that is not indexed."""
        self.sizes  # noqa: B018 - set up
        loader = self._loaders[part]
        if not is_indexed(loader):
            raise BadInput(
                "data", self.name, f"a DataLoader of an indexed data set for {part}, whose samples have rows"
            )
        return torch.arange(len(loader.dataset))

    @property
    def train_inputs_change(self) -> bool:
        """Whether the first samples differ in two epochs, as those of an augmentation do."""
        self.sizes  # noqa: B018 - set up
        loader = self._loaders["train"]
        if not is_indexed(loader):
            return False
        few = [[*range(min(READ, len(loader.dataset)))]]
        (once, _), (again, _) = (next(fetch_batches(loader, key, few)) for key in (self.seed, self.seed + 1))
        return not torch.equal(once, again)

    @property
    def places(self) -> int:
        self.sizes  # noqa: B018 - set up
        loader = self._loaders["train"]
        return len(loader.dataset) if is_indexed(loader) else self.sizes["train"]

    def samples(self, part: str, chosen: Tensor, dtype: torch.dtype | None = None) -> Split:
        """The samples at these (k,) places in the order of a loader as it is for `seed`, normalised."""
        self.sizes  # noqa: B018 - set up
        inputs, labels = self._call_hooks(*read_samples(self._loaders[part], self.seed, chosen))
        return Split(self.normalize(inputs, dtype), labels)

    def fingerprint(self) -> Fingerprint:
        """What the data module's own `fingerprint()` says, a text, if it has one.

        Otherwise of each part how many samples there are, and of `READ` samples labels and means of inputs. What
        differs when it is read again, as an augmentation by a generator of the data set's own, does not count.
        """
        if callable(fingerprint := getattr(self.data, "fingerprint", None)):
            return {"all": fingerprint()}
        return {
            part: {"samples": count, **self._few_samples(part, count)} for part, count in self.sizes.items() if count
        }

    def _few_samples(self, part: str, count: int) -> dict[str, list[float] | None]:
        few = min(READ, count)
        places = torch.arange(few) * (count // few if is_indexed(self._loaders[part]) else 1)  # or all before are read
        once, again = (with_seed(self.seed, lambda: self.samples(part, places)) for _ in range(2))
        means, others = (split.inputs.double().flatten(1).mean(1).tolist() for split in (once, again))
        labels = once.labels.tolist()
        return {
            "labels": labels if labels == again.labels.tolist() else None,
            "means": means if means == others else None,
        }

    @property
    def example(self) -> Tensor:
        """(2, ...), inputs as a net takes them, of zeros."""
        return self.normalize(torch.zeros(2, *self.input_shape, dtype=self._dtype))

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Floats of the `dtype`; whole numbers as they are."""
        return inputs.to(dtype or torch.get_default_dtype()) if inputs.is_floating_point() else inputs

    def train_dataloader(self) -> SharedLoader:  # type: ignore[override]
        """The loader's batches in the order of (order_seed, epoch), each cut into contiguous shares for the ranks."""
        rank, replicas = self._rank_and_replicas()
        self.check_replicas(replicas, getattr(self.trainer and self.trainer.strategy, "exact", None))
        self.data.trainer = self.trainer
        return SharedLoader(self._loaders["train"], self._order(self.sizes["train"]), rank, replicas)

    def _evaluation_loader(self, part: str) -> RoundRobinLoader:  # type: ignore[override]
        """The part's batches, each on one rank; a Trainer's limit counts those of all ranks."""
        self.data.trainer = self.trainer
        kept = math.ceil(self._samples_in_limit(part, self.trainer) / self._batch_size(part))
        if isinstance(getattr(self.trainer, LIMITS[part], None), float):  # Lightning would apply it again
            setattr(self.trainer, LIMITS[part], kept)
        return RoundRobinLoader(self._loaders[part], kept, *self._rank_and_replicas(), self.seed)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = read_pair(self.data.on_before_batch_transfer((batch.inputs, batch.labels), dataloader_idx))
        return batch._replace(inputs=inputs, labels=labels)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Lightning's hook, on the device: as the data module does; floats get the module's type."""
        pair = self.data.on_after_batch_transfer((batch.inputs, batch.labels), dataloader_idx)
        inputs, labels = self._unpack(pair)
        if labels.is_cpu:  # on a GPU this would wait for it
            self._check_batch(inputs, labels, "a batch")
        return super().on_after_batch_transfer(batch._replace(inputs=inputs, labels=labels), dataloader_idx)

    def teardown(self, stage: str) -> None:
        self.data.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.load_state_dict(state_dict)
