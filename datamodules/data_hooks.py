"""Lightning's hooks of a data module: loaders of global batches, under a Trainer's limits."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from apprentice import keyed
from apprentice.batch import Batch
from apprentice.errors import BadInput
from datamodules import splits
from datamodules.batch_shapes import BatchShapes, TypicalBatch
from datamodules.loaders import ChunkLoader, EpochOrder, PartitionedOrder, TrainLoader, no_loaders
from datamodules.splits import Samples
from datamodules.streams import Augment, SampleStream

LIMITS = {"train": "limit_train_batches", "validation": "limit_val_batches", "test": "limit_test_batches"}


class DataHooks(LightningDataModule):
    """What gives batches of the splits of a data module; `InMemoryData` says what its attributes are."""

    batch_size: int
    label_shape: tuple[int, ...]
    evaluated_rows: int | None
    order_seed: int
    seed: int
    partition: list[float] | None
    hides_labels: bool
    _moved: dict[tuple[str, torch.device], Samples]

    def split(self, part: str) -> Samples | SampleStream:
        """The samples of `train`, `validation` or `test`."""
        raise NotImplementedError

    def labelled_samples(self) -> Tensor | None:
        """Return which training samples have labels that are not hidden, (n,) bool on the CPU; None for all."""
        raise NotImplementedError

    def weights_of_classes(self, labels: Tensor) -> Tensor | None:
        """Return (classes,) float64, what each class counts in training, given the labels (n,) that are known."""
        return None

    @property
    def augmentation(self) -> Augment | None:
        """What workers do to streamed training inputs, of an epoch and with this index; picklable."""
        return None

    @property
    def wants_partners(self) -> bool:
        """Whether training batches bring the samples that theirs are to be mixed with."""
        return False

    @property
    def sizes(self) -> dict[str, int]:
        """Counts of samples: train, validation, test."""
        return {part: self._count(part) for part in LIMITS}

    @property
    def evaluation_batch_size(self) -> int:
        """Samples in an evaluation batch; follows `batch_size`, which a tuner may change, unless it is held."""
        return self.evaluated_rows or self.batch_size

    def used(self, trainer: Trainer) -> dict[str, int]:
        """`sizes` under a Trainer's `limit_train_batches` and the like; BadInput if one is less than a batch."""
        return {part: self._samples_in_limit(part, trainer) for part in LIMITS}

    def train_batches(self, trainer: Trainer) -> int:
        """Batches of an epoch under a Trainer's `limit_train_batches`."""
        return math.ceil(self._samples_in_limit("train", trainer) / self.batch_size)

    def batch_shapes(self, epoch: int) -> BatchShapes:
        """Return the sizes of the batches of a training epoch, under the Trainer's limit."""
        return BatchShapes.equal(self._samples_in_limit("train", self.trainer), self.batch_size, self.label_shape)

    def typical_batch(self, dtype: torch.dtype | None = None) -> TypicalBatch:
        """Return a training batch that stands for the others, normalised: the first samples, if all are of a shape."""
        chosen = torch.arange(min(self.batch_size, self.sizes["train"]))
        inputs, labels = self.samples("train", chosen, dtype)
        return TypicalBatch(Batch.of((inputs, labels), 0, shared=False), labels.numel())

    def samples(self, part: str, chosen: Tensor, dtype: torch.dtype | None = None) -> splits.Split:
        """Return the samples of a part at these (k,) places, normalised."""
        raise NotImplementedError

    def _batch_size(self, part: str) -> int:
        return self.batch_size if part == "train" else self.evaluation_batch_size

    def _count(self, part: str) -> int:
        return len(self.split(part).labels)

    def _samples_in_limit(self, part: str, trainer: Trainer | None) -> int:
        samples = self._count(part)
        count = len(self._order(samples)) if part == "train" else samples
        return count_in_limit(trainer, part, count, self._batch_size(part))

    def train_dataloader(self) -> TrainLoader:
        """Global batches in the order of (order_seed, epoch), each cut into contiguous shares for the ranks.

        BadInput if there are fewer samples than ranks, or another number of fractions in `partition`.
        """
        rank, replicas = self._rank_and_replicas()
        self.check_replicas(replicas, getattr(self.trainer and self.trainer.strategy, "exact", None))
        train = self._on_device("train")
        labelled = self.labelled_samples() if self.hides_labels else None
        weights = self.weights_of_classes(train.labels if labelled is None else train.labels[labelled])
        return TrainLoader(
            train, self.batch_size, self._order(len(train.labels)), rank, replicas, labelled, self.wants_partners,
            self.augmentation, weights,
        )  # fmt: skip

    def _order(self, size: int) -> EpochOrder:
        if self.partition is None:
            return EpochOrder(size, *self._order_options)
        return PartitionedOrder(self.partition, keyed.fold_in(self.seed, 3), size, *self._order_options)

    def order_of(self, epoch: int) -> Tensor:
        """Return (n,) int64, the places of the training samples in the order of an epoch's batches."""
        order = self._order(self.sizes["train"])
        order.set_epoch(epoch)
        return order.indices()

    @property
    def _order_options(self) -> tuple[int, Callable[[], int], bool]:
        """The seed, the position and whether all epochs have the order of the first."""
        return self.order_seed, self._position, bool(getattr(self.trainer, "overfit_batches", 0))

    def train_in_order(self, rank: int = 0, replicas: int = 1) -> ChunkLoader:
        """The training set once, in chunks in index order; `index` is the same as in `train_dataloader`'s batches."""
        return ChunkLoader(self._on_device("train"), self.batch_size, rank, replicas)

    def val_dataloader(self) -> ChunkLoader | CombinedLoader:
        """The validation samples, each exactly once; no loader if there are none. For limits see `test_dataloader`."""
        return self._evaluation_loader("validation") if self.sizes["validation"] else no_loaders()

    def test_dataloader(self) -> ChunkLoader:
        """The test samples, each exactly once; a Trainer's limit counts batches of one device, in a seeded order."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> ChunkLoader:
        return self.test_dataloader()

    def check_replicas(self, replicas: int, exact: int | None = None) -> None:
        """Raise BadInput if a batch can't be shared among so many ranks, or not under `exact`."""
        splits.check_partition(self.partition, replicas, exact)
        if self.batch_size < replicas:
            raise BadInput("data.batch_size", self.batch_size, f"at least {replicas}, one sample for each device")

    def _evaluation_loader(self, part: str) -> ChunkLoader:
        samples, size = self._on_device(part), self.evaluation_batch_size
        kept = self._samples_in_limit(part, self.trainer)
        if kept == len(samples.labels):
            return ChunkLoader(samples, size, *self._rank_and_replicas())
        if isinstance(getattr(self.trainer, LIMITS[part]), float):  # Lightning would apply it again, to this rank's
            setattr(self.trainer, LIMITS[part], math.ceil(kept / size))
        return ChunkLoader(samples, size, *self._rank_and_replicas(), self._evaluated_places(part, kept))

    def evaluated(self, part: str) -> Tensor:
        """(k,) int64, the places of `validation` or `test` that are evaluated under the Trainer's limits."""
        kept = self._samples_in_limit(part, self.trainer)
        return torch.arange(kept) if kept == self._count(part) else self._evaluated_places(part, kept)

    def _evaluated_places(self, part: str, kept: int) -> Tensor:
        """(kept,) int64, sorted, the samples that are evaluated under a limit."""
        return keyed.permutation(len(self.split(part).labels), keyed.fold_in(self.seed, 4))[:kept].sort().values

    def _rank_and_replicas(self) -> tuple[int, int]:
        # Under a pipeline, fewer replicas share a batch than there are ranks.
        place = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        return place["rank"], place["num_replicas"]

    def _position(self) -> int:
        """Batches of the current epoch that a running fit has completed; above 0 after a resume in mid-epoch."""
        if self.trainer is None or not self.trainer.training:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _on_device(self, part: str) -> Samples | SampleStream:
        split = self.split(part)
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        if isinstance(split, SampleStream):
            return split.to(device, 1 if self.trainer is None else self.trainer.num_devices)
        if device.type == "cuda" and (part, device) not in self._moved:
            self._moved[part, device] = split.to(device)
        return self._moved.get((part, device), split)

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Stored samples (B, ...) to inputs of nets: whole numbers, int64. Images override this; floats get `dtype`."""
        return inputs.long()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Lightning's hook, on the device: stored samples to inputs of the module's type."""
        if not isinstance(batch, Batch):
            return batch
        dtype = None if self.trainer is None else cast("torch.dtype", self.trainer.lightning_module.dtype)
        return batch._replace(inputs=self.normalize(batch.inputs, dtype))


def count_in_limit(trainer: Trainer | None, part: str, count: int, size: int) -> int:
    """Return how many of `count` samples, in batches of `size`, are within a Trainer's limit for a part of the data.

    The limit is an int, a count of batches, or a float, a fraction; BadInput if it is less than a batch.
    """
    limit = getattr(trainer, LIMITS[part], 1.0)
    whole = math.ceil(count / size)
    batches = min(whole, limit) if isinstance(limit, int) else int(whole * limit)
    if whole and limit and not batches:
        expected = f"at least one batch: a count, as 1, or a fraction of the {whole}, at least {1 / whole:.3g}"
        raise BadInput(f"trainer.{LIMITS[part]}", limit, expected)
    return min(batches * size, count)
