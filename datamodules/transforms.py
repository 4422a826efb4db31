"""Random transforms of torchvision, an image at a time, whose draws depend on seed, epoch and sample alone."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.errors import BadInput, reason

FLAG = "data.transforms"


class Transforms:
    """Transforms of (C, H, W) uint8 images to images of the same size, applied one after another.

    They draw from the generators of torch on the CPU, numpy and Python, which are seeded for each image and restored,
    so an image's bits do not depend on the rank, the worker or the other images. An entry is a name in
    `torchvision.transforms.v2`, an import path, one of these with options as `{RandomErasing: {p: 0.2}}`, or a
    callable. An option `transforms` may hold entries in turn. A required `size` is that of the images, whose `shape` is
    (C, H, W).

    Raises:
        BadInput: there is no such transform or option, or it gives images of another type or size.
    """

    def __init__(self, entries: Sequence[Any], shape: tuple[int, ...]) -> None:
        self.shape, self.names = shape, [_name(entry) for entry in entries]
        self.steps = [_build(entry, list(shape[1:])) for entry in entries]
        self(torch.zeros(1, *shape, dtype=torch.uint8), 0, torch.zeros(1, dtype=torch.int64))

    def __call__(self, images: Tensor, key: int, index: Tensor) -> Tensor:
        """Return (B, C, H, W), transformed by draws for `key` and each sample's `index` (B,); a new tensor."""

        def transform() -> Tensor:
            transformed = torch.empty_like(images)
            for row, place in enumerate(index.tolist()):
                keyed.reseed(keyed.fold_in(key, place))
                transformed[row] = self._transform(images[row])
            return transformed

        return keyed.with_seed(0, transform)

    def _transform(self, image: Tensor) -> Tensor:
        for name, step in zip(self.names, self.steps, strict=True):
            try:
                image = step(image)
            except Exception as error:  # whatever a user's transform does
                raise BadInput(
                    FLAG, name, f"a transform of one {self.shape} image; it failed: {reason(error)}"
                ) from error
            if not isinstance(image, Tensor) or tuple(image.shape) != self.shape or image.dtype != torch.uint8:
                kind = f"{tuple(image.shape)} {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
                expected = f"a transform that keeps images uint8 of {self.shape}; it gives {kind}"
                raise BadInput(FLAG, name, f"{expected}. Training normalises them by itself: `data.mean`, `data.std`")
        return image


def _name(entry: Any) -> str:
    if isinstance(entry, dict) and len(entry) == 1:
        return str(next(iter(entry)))
    return entry if isinstance(entry, str) else type(entry).__name__


def _build(entry: Any, size: list[int]) -> Callable[[Any], Any]:
    """Build the transform of an entry."""
    if callable(entry):
        return entry
    options = next(iter(entry.values())) if isinstance(entry, dict) and len(entry) == 1 else {}
    if not isinstance(entry, str | dict) or not isinstance(options, dict):
        expected = "a name in torchvision.transforms.v2, an import path, or one of them with options: {NAME: {...}}"
        raise BadInput(FLAG, entry, expected)
    name = _name(entry)
    make, options = _import_class(name), dict(options)
    if isinstance(options.get("transforms"), list):
        options["transforms"] = [_build(inner, size) for inner in options["transforms"]]
    if isinstance(options.get("interpolation"), str):
        from torchvision.transforms import InterpolationMode

        options["interpolation"] = InterpolationMode(options["interpolation"])
    try:
        parameter = inspect.signature(make).parameters.get("size")
        if parameter is not None and parameter.default is parameter.empty:
            options.setdefault("size", size)
        return make(**options)
    except Exception as error:  # whatever a user's class does
        raise BadInput(FLAG, name, f"options that it takes: {reason(error)}") from error


def _import_class(name: str) -> Callable[..., Any]:
    path = name if "." in name else f"torchvision.transforms.v2.{name}"
    module_name, _, short = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does
        raise BadInput(FLAG, name, f"an import path; {reason(error)}") from error
    transform = getattr(module, short, None)
    if not inspect.isclass(transform):
        classes = [other for other, value in vars(module).items() if inspect.isclass(value)]
        near = ", ".join(difflib.get_close_matches(short, classes))
        raise BadInput(FLAG, name, f"a class of {module_name}{near and f'; near: {near}'}")
    return transform
