"""The base class of image data modules: normalisation and augmentation of a batch on the training device."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice import keyed
from apprentice.batch import Batch, Partners
from apprentice.errors import BadInput
from datamodules.classes import ClassData
from datamodules.mixing import Mixing
from datamodules.preparation import Preparation, normalize
from datamodules.streams import Augment, SampleStream
from datamodules.transforms import Transforms

ImageTask = Literal["classification", "embedding"]
TASKS = CLASSIFICATION, EMBEDDING = get_args(ImageTask)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation of its channels


class ImageData(ClassData):
    """Images in memory as uint8.

    For another data set, set the attributes and override `read`, and `prepare_data` if it must be downloaded.

    Attributes:
        input_shape: (C, H, W).
        mean: of each channel, on a scale from 0 to 1.
        std: standard deviation of each channel, likewise.
        levels: the pixel value that is 1 on that scale.
        flips: whether a mirrored image still belongs to its class.

    Args:
        batch_size: images in a batch over all devices together, whatever their number.
        augment: random crop, and flip where that makes sense, drawn from training seed, epoch and sample.
        transforms: torchvision's transforms of training images, in this order and after `augment`, likewise drawn:
            names in torchvision.transforms.v2 or import paths, with options as {RandomErasing: {p: 0.2}}. They get and
            give uint8 images of one size.
        mixup: mix each training image with another one, by shares from Beta(mixup, mixup), drawn from seed and step;
            the teacher sees the mixed image, and losses with labels are mixed alike.
        cutmix: paste a part of another training image into each, by Beta(cutmix, cutmix); with `mixup` too, half of the
            batches get one, half the other.
        mean: of each channel, on a scale from 0 to 1, in place of the set's usual one.
        std: standard deviation of each channel, likewise.
        task: what nets learn: `classification`, or `embedding`, for which no student sees a label; default: the set's.
        options: those of ClassData.
    """

    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    levels: int = 255
    flips: bool = False

    def __init__(
        self,
        batch_size: int = 128,
        *,
        augment: bool = False,
        transforms: list[Any] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        task: ImageTask | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        if task not in {None, *TASKS}:
            raise BadInput("data.task", task, " or ".join(TASKS))
        if task == EMBEDDING and self.labelled is not None:
            raise BadInput(
                "data.labelled", self.labelled, "not allowed with `data.task embedding`, which has no labels"
            )
        self.task = task or self.task
        self.augment, self.transforms, self.mixing = augment, transforms or [], Mixing(mixup, cutmix)
        if self.mixing and self.labelled is not None:
            raise BadInput("data.labelled", self.labelled, "all labels, as `data.mixup` and `data.cutmix` mix them")
        channels = len(type(self).mean)
        for flag, values, low in (("mean", mean, float("-inf")), ("std", std, 0)):
            if values is None:
                continue
            if len(values) != channels or not all(low < value < float("inf") for value in values):
                count = f"a list of {channels} number{'s' * (channels > 1)}, one a channel"
                raise BadInput(f"data.{flag}", values, count if low else f"{count}, above 0")
            setattr(self, flag, tuple(values))

    def setup(self, stage: str | None = None) -> None:
        """Read the data as InMemoryData does; then try the transforms on an image of zeros."""
        super().setup(stage)
        self._keyed_transforms  # noqa: B018

    @functools.cached_property
    def _keyed_transforms(self) -> Transforms:
        return Transforms(self.transforms, self.input_shape)

    @property
    def shows_labels(self) -> bool:
        return self.task != EMBEDDING and super().shows_labels

    def labelled_samples(self) -> Tensor | None:
        if self.task != EMBEDDING:
            return super().labelled_samples()
        return torch.zeros(len(self._true_labels), dtype=torch.bool)

    @property
    def train_inputs_repeat(self) -> bool:
        return not (self.augment or self.transforms or self.mixing)

    @property
    def wants_partners(self) -> bool:
        return bool(self.mixing)

    def normalize(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise stored images (B, C, H, W) uint8 to floats of mean 0 and deviation 1.

        Equal to torchvision's ToTensor and Normalize, bit for bit. Computes in float64 if that is the `dtype` (default:
        torch's default type), otherwise in float32.
        """
        return normalize(images, self.mean, self.std, dtype or torch.get_default_dtype(), self.levels)

    @property
    def preparation(self) -> Preparation:
        if type(self).normalize is not ImageData.normalize:  # a user's own, which numbers don't tell
            return super().preparation
        return Preparation(kind="images", shape=self.input_shape, mean=tuple(self.mean), std=tuple(self.std))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment in training, then normalise to the module's type; Lightning's hook, on the device."""
        training = self.trainer is not None and self.trainer.training
        streamed = training and isinstance(self.split("train"), SampleStream)  # workers have augmented these
        if isinstance(batch, Batch) and training and not streamed and not self.train_inputs_repeat:
            epoch = batch.step // math.ceil(self.sizes["train"] / self.batch_size)
            batch = batch._replace(inputs=self.augmentation(batch.inputs, epoch, batch.index))
            if isinstance(batch.mixed, Partners):
                second = self.augmentation(batch.mixed.inputs, epoch, batch.mixed.index)
                batch = batch._replace(mixed=batch.mixed._replace(inputs=second))
        batch = super().on_after_batch_transfer(batch, dataloader_idx)
        if training and isinstance(batch, Batch) and isinstance(batch.mixed, Partners):
            second = self.normalize(batch.mixed.inputs, batch.inputs.dtype)
            batch = self.mixing(batch._replace(mixed=batch.mixed._replace(inputs=second)), self.order_seed)
        return batch

    @property
    def augmentation(self) -> Augment:
        """Augmentation, by the workers where images are streamed, otherwise on the device."""
        return Augmentation(self.order_seed, self.augment, self.flips, self._keyed_transforms)


@dataclass(frozen=True)
class Augmentation:
    """Augments training images: shifts, mirrors half of them if `flips`, then transforms."""

    seed: int
    shifts: bool
    flips: bool
    transforms: Transforms

    def __call__(self, images: Tensor, epoch: int, index: Tensor) -> Tensor:
        """Augment stored images (B, C, H, W) for an epoch; `index` (B,) has their places in the data set."""
        key = keyed.fold_in(self.seed, epoch)
        if self.shifts:
            images = augment(images, key, index, self.flips)
        return self.transforms(images, key, index) if self.transforms.steps else images


def augment(images: Tensor, key: int, index: Tensor, flip: bool) -> Tensor:
    """Shift each image (B, C, H, W) randomly over a border of 0, black before normalising; `flip` mirrors half of them.

    A sample's draw depends on `key` and on its place in the data set, `index` (B,), alone. Returns a new tensor.
    """
    b, _, h, w = images.shape
    pad = min(4, min(h, w) // 8)  # 4, as usual at 32 x 32, and proportionally fewer for smaller images
    drawn = keyed.bits(key, index, columns=3)  # (B, 3) in [0, 2**32)
    corners = (drawn[:, :2] * (2 * pad + 1)) >> 32  # (B, 2), in [0, 2 * pad]
    mirrored = (drawn[:, 2] >= 2**31) & flip
    padded = F.pad(images, (pad, pad, pad, pad))
    if images.is_cpu:  # image by image, copying rows: at 256 x 256 six times as fast as gathering pixels
        crops = torch.empty_like(images)
        for i, ((top, left), mirror) in enumerate(zip(corners.tolist(), mirrored.tolist(), strict=True)):
            window = padded[i, :, top : top + h, left : left + w]
            crops[i] = window.flip(2) if mirror else window
        return crops
    windows = padded.unfold(2, h, 1).unfold(3, w, 1)  # (B, C, 2 pad + 1, 2 pad + 1, H, W)
    crops = windows[torch.arange(b, device=images.device), :, corners[:, 0], corners[:, 1]]
    return torch.where(mirrored[:, None, None, None], crops.flip(3), crops)
