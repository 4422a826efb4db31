"""The base of all data modules: splits, and loaders whose batches are global."""

import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules import fingerprints, splits
from datamodules.data_hooks import LIMITS, DataHooks
from datamodules.fingerprints import Fingerprint
from datamodules.preparation import Preparation
from datamodules.splits import LabelledBy, Samples, Source, Subset
from datamodules.streams import SampleStream

LARGEST_BATCH = 2**31 - 1  # of all devices together; a batch of more than all samples is one of all
IMAGE = 3  # dimensions of an image: channels, height, width


class InMemoryData(DataHooks):
    """Labelled samples, in memory as uint8 unless a data set streams them, loaded in batches.

    A data set overrides `read`; a kind of data whose nets do not take whole numbers overrides `normalize`.

    Attributes:
        input_shape: of one sample, as nets take it.
        class_names: names of the classes, in the order of their labels.
        given_to_nets: the attributes that a net's constructor takes, by name.
        task: what the labels are for, by its name in `lit_modules.tasks`. Those of `multilabel` and `regression` are
            (n, C), a column for each of `class_names`.
        label_shape: of a sample's labels; () for one class a sample.
        free_options: options that change neither training nor samples, such as where a fixed data set lies.
        hides_labels: whether training batches hide the labels that `labelled` leaves out. A teacher sees all.
        packs_samples: whether rows of training batches hold several samples: see `Batch.starts`.
        order_seed: the training seed. Order, augmentation and, unless `labelled_by` is `split`, the draw of labelled
            samples depend on it; splits and subsets depend on `seed` alone.

    Args:
        batch_size: samples in a batch over all devices together, whatever their number.
        train_size: train on a seeded subset of this size; default: on all samples that are not held out.
        test_size: likewise for testing, a count or a fraction; default: all. Of data without a test set, how many of
            all samples to test on, stratified by class; default: a fifth.
        validation_size: training samples to hold out for validation, stratified by class: a count, or a fraction of the
            training set; 0 for none.
        subset: how `train_size` and `test_size` draw: `balanced` takes equal counts of all classes, as far as they
            last; `proportional` keeps the proportions of the set.
        seed: of splits and subsets.
        partition: fractions of the training samples, such as [0.7, 0.2, 0.1]: each device trains on a fixed share of
            its own. A batch still has `batch_size` samples over all devices, each device's in proportion, and an update
            is still their mean. Default: every batch is split evenly.
        labelled: train students with the labels of so many training samples, in equal counts of all classes as far as
            they last, and with the teacher's outputs for all; the teacher has all labels. Default: all labels.
        labelled_by: what draws these samples: each training `seed` its own, so that the spread over seeds holds the
            luck of the draw; or `split`, the same for all, by `seed` as the splits are.
    """

    input_shape: tuple[int, ...]
    class_names: tuple[str, ...] = ()
    given_to_nets: tuple[str, ...] = ("input_shape", "num_classes", "embeds")
    task: str = "classification"
    label_shape: tuple[int, ...] = ()
    packs_samples: bool = False
    free_options: ClassVar[frozenset[str]] = frozenset({"num_workers"})

    def __init__(
        self,
        batch_size: int = 128,
        *,
        train_size: int | None = None,
        test_size: int | float | None = None,  # noqa: PYI041 - as validation_size
        validation_size: int | float = 0.1,  # noqa: PYI041 - the command line must distinguish a count from a fraction
        subset: Subset = "balanced",
        seed: int = 0,
        partition: list[float] | None = None,
        labelled: int | None = None,
        labelled_by: LabelledBy = "seed",
    ) -> None:
        super().__init__()
        if not isinstance(batch_size, int) or not 1 <= batch_size <= LARGEST_BATCH:
            raise BadInput("data.batch_size", batch_size, f"a whole number of at least 1, at most {LARGEST_BATCH:,}")
        splits.check_sizes(train_size, test_size, validation_size, subset)
        splits.check_partition(partition)
        splits.check_labelled_by(labelled_by, labelled)
        self.batch_size, self.train_size, self.test_size = batch_size, train_size, test_size
        self.validation_size, self.subset, self.seed, self.partition = validation_size, subset, seed, partition
        self.labelled, self.labelled_by, self.hides_labels = labelled, labelled_by, True
        self._true_labels = torch.empty(0, dtype=torch.int64)  # of training samples, without noise; after `setup`
        self.name = type(self).__name__
        self.order_seed = 0
        self.evaluated_rows: int | None = None
        self._splits: dict[str, Samples | SampleStream] = {}
        self.test_is_drawn = False  # known after `setup`
        self._moved: dict[tuple[str, torch.device], Samples] = {}
        self._rows: dict[str, Tensor] = {}  # of each part its places in the set that it was drawn from, after `setup`
        self._apart = set[str]()  # parts with a set of their own, after `setup`

    def read(self) -> tuple[Source, ...]:
        """Read the whole training and test sets, of which subsets are drawn later, and a third to validate on, if any.

        That is used whole, unless `validation_size` is 0. Without a test set, one is drawn from the training set, and
        no group of near duplicates is split. Called once; BadInput if data are absent or damaged.
        """
        raise NotImplementedError

    def near_duplicates(self, source: Source) -> Tensor | None:
        """Return (n,) int64, the group of each sample that has to stay on one side of a split; None for no groups."""
        return None

    def relabel(self, source: Source, train: Tensor) -> Source:
        """Return the training set with the labels to train on; `train` (k,) are the places that train."""
        return source

    def split_list(self) -> list[tuple[str, ...]]:
        """Return part, name, class and, after `relabel`, trained class of each sample if the test set is drawn."""
        return []

    def limit_parts(self, trainer: Trainer | None) -> None:
        """Measure what depends on the samples that a Trainer evaluates."""

    def check_fits(self, count: int) -> None:
        """Raise BadInput if so many samples would not fit in memory; sets of unknown size override this."""

    def hold(self, source: Source, places: Tensor) -> Samples | SampleStream:
        """Return the samples at (k,) places of a source, read into memory now, or `SampleStream` while training."""
        return source.take(places)

    def setup(self, stage: str | None = None) -> None:
        """Read the data once; later calls, also in forked ranks, do nothing. Prints unequal class counts."""
        if self._splits:
            return
        training, *others = map(self._label, self.read())
        for name in self.class_names:
            if name.encode(errors="replace").decode() != name:  # bytes that are not UTF-8 are surrogates
                raise BadInput("data", self.name, f"classes named in UTF-8; {os.fsencode(name)!r} is not")
        self.test_is_drawn = not others
        groups = self.near_duplicates(training) if self.test_is_drawn else None
        sizes = splits.Sizes(self.train_size, self.validation_size, self.test_size, self.subset, self.seed)
        places = splits.draw_parts([source.labels for source in (training, *others)], sizes, groups)
        self._rows = dict(zip(LIMITS, places, strict=True))
        self._apart = {"train", *(["test"] if others else []), *(["validation"] if others[1:] else [])}
        self.check_fits(sum(map(len, places)))
        self._true_labels = training.labels[places[0]]
        self.labelled_samples()  # raises BadInput if there are not so many
        sources = (
            self.relabel(training, places[0]),
            (others[1:] or [training])[0],
            (others or [training])[0],
        )  # in the order of `LIMITS`
        self._splits = {part: self.hold(sources[i], places[i]) for i, part in enumerate(LIMITS)}
        if self.test_is_drawn:
            self.say(splits.describe_drawn(self.sizes, self._splits["test"].labels, self.class_names, self.seed))
        if counts := splits.describe_imbalance(self._splits["train"].labels, self.class_names):
            self.say(f"training samples of a class: {counts}")

    def _label(self, source: Source) -> Source:
        """Return a source with labels as its task has them."""
        if self.task not in splits.FLOAT_TASKS:
            return source
        labels = splits.as_floats(source.labels, self.task, self.num_classes, str(self.name))
        return splits.Split(source.take(torch.arange(len(labels))).inputs, labels)

    @property
    def label_scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation (D,) of the numbers that train, as which nets see them."""
        self.split("train")
        return splits.scale_of(self._true_labels)

    def labelled_samples(self) -> Tensor | None:
        """Return which training samples have labels that students see, (n,) bool; None for all. See `order_seed`."""
        if self.labelled is None:
            return None
        key = keyed.fold_in(self.seed, 6)
        if self.labelled_by == "seed":
            key = keyed.fold_in(key, self.order_seed)
        return splits.draw_labelled(self._true_labels, self.labelled, key)

    @property
    def shows_labels(self) -> bool:
        """Whether students see the labels of all training samples."""
        return self.labelled is None

    def say(self, line: str) -> None:
        """Print a line about the data to stderr, in one process."""
        rank_zero_only(sys.stderr.write)(f"{self.name}: {line}\n")

    def split(self, part: str) -> Samples | SampleStream:
        """The samples of `train`, `validation` or `test`; reads the data first if needed, such as in a notebook."""
        if not self._splits:
            self.prepare_data()
            self.setup()
        return self._splits[part]

    def samples(self, part: str, chosen: Tensor, dtype: torch.dtype | None = None) -> splits.Split:
        """The samples of `train`, `validation` or `test` at these (k,) places, normalised."""
        inputs, labels = self.split(part).take(chosen)
        return splits.Split(self.normalize(inputs, dtype), labels)

    def test_images(self, places: Sequence[int]) -> np.ndarray | None:
        """The images (k, C, H, W) with C 1 or 3 at these places of the test set; None if its samples are no images."""
        if len(self.input_shape) != IMAGE or self.input_shape[0] not in {1, 3}:
            return None
        return self.samples("test", torch.tensor(places)).inputs.numpy()

    def test_units(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Return what is drawn together of test samples at places (n,), if that is not each sample by itself.

        As `unit` (n,) a number for what a sample belongs to; as `size` (n,) its weight in the metric.
        """
        return {}

    def fingerprint(self) -> Fingerprint:
        """Describe the samples of each part, a copy's alike, so that a resumed run can tell if they are other ones."""
        return {part: fingerprints.of_samples(self.split(part)) for part in LIMITS}

    def source_of(self, part: str) -> str:
        """Return the part whose set the samples of a part were drawn from, such as train of those held out."""
        self.split(part)
        return part if part in self._apart else "train"

    def rows_of(self, part: str) -> Tensor:
        """Return (n,) int64, for each `index` of a part's batches the sample's place in the set it was drawn from."""
        self.split(part)
        return self._rows[part]

    def names_of(self, part: str, kind: str) -> Sequence[str] | None:
        """Return what tells the samples of a part from others, by `file_name` or `text`; None if nothing does.

        Of rows of several texts, these are all texts, row by row.
        """
        return None

    @property
    def places(self) -> int:
        """How many samples the `index` of training batches numbers."""
        return self.sizes["train"]

    @property
    def train_inputs_repeat(self) -> bool:
        """Whether a training sample is the same in each epoch, so that a teacher's output for it can be cached."""
        return True

    @property
    def train_inputs_change(self) -> bool:
        """Whether a training sample is another one in each epoch."""
        return not self.train_inputs_repeat

    def check_net(self, net: Any, whose: str, trained: bool = True) -> None:
        """Raise BadInput if the weights of `whose`, a `Net`, are for other inputs; if `trained`, it may learn them."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def embeds(self) -> bool:
        """Whether nets are to give embeddings, which a class of encoders does by itself."""
        return self.task == "embedding"

    @property
    def net_arguments(self) -> dict[str, Any]:
        """Arguments of a net's constructor that the data determines."""
        return {name: getattr(self, name) for name in self.given_to_nets}

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Arguments of a task's constructor that the data determines."""
        return {}

    @property
    def module_arguments(self) -> dict[str, Any]:
        """Arguments of a LightningModule's constructor that the data determines."""
        return {}

    @property
    def preparation(self) -> Preparation:
        """How raw samples become inputs of a net, as net.yaml records it."""
        return Preparation(kind="tensors", shape=tuple(self.input_shape))

    @property
    def example(self) -> Tensor:
        """(2, ...), inputs as a net takes them, from stored zeros."""
        return self.normalize(torch.zeros(2, *self.input_shape, dtype=torch.uint8))
