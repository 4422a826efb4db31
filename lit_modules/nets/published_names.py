"""Weights of the repositories behind published tables, for the nets of the same names here.

RepDistiller (Tian et al. 2020, "Contrastive Representation Distillation") and mdistiller (Zhao et al. 2022, "Decoupled
Knowledge Distillation") have the same nets with the same names of layers, and save them as `{"model": weights}`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lit_modules import nets

COUNT = "num_batches_tracked"
WIDE = [32, 64, 128, 256]
NETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType({
    **{f"resnet{depth}": ("ResNet", {"depth": depth, "shortcut": "conv"}) for depth in (8, 14, 20, 32, 44, 56, 110)},
    **{f"resnet{d}x4": ("ResNet", {"depth": d, "widths": WIDE, "shortcut": "conv"}) for d in (8, 32)},
    **{f"wrn_{d}_{k}": ("WideResNet", {"depth": d, "widen": k}) for d in (16, 40) for k in (1, 2)},
    **{f"vgg{depth}": ("VGG", {"depth": depth}) for depth in (8, 11, 13, 16, 19)},
    "MobileNetV2": ("MobileNetV2", {"width": 0.5}),
    "ShuffleV1": ("ShuffleNetV1", {"groups": 3}),
    "ShuffleV2": ("ShuffleNetV2", {"width": 1.0}),
})  # fmt: skip

STEM = (r"^conv1\.", "stem.0."), (r"^bn1\.", "stem.1.")
# Changes of a key, in order, from their names of layers to ours.
KEYS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({
    "ResNet": (
        *STEM, (r"^layer(\d)\.", r"stage\1."), (r"\.bn(\d)\.", r".norm\1."), (r"\.downsample\.", ".shortcut."),
        (r"^fc\.", "head."),
    ),
    "WideResNet": (
        (r"^conv1\.", "stem."), (r"^bn1\.", "norm."), (r"^block(\d)\.layer\.", r"stage\1."),
        (r"\.bn(\d)\.", r".norm\1."), (r"\.convShortcut\.", ".shortcut."), (r"^fc\.", "head."),
    ),
    "VGG": ((r"^block0\.", "stem."), (r"^block(\d)\.", r"stage\1."), (r"^classifier\.", "head.")),
    "MobileNetV2": (
        (r"^conv1\.", "stem."), (r"^conv2\.", "last."), (r"^(blocks\.\d+\.\d+)\.conv\.", r"\1.layers."),
        (r"^classifier\.0\.", "head."),
    ),
    "ShuffleNetV1": (
        *STEM, (r"^layer(\d)\.", r"stage\1."), (r"^linear\.", "head."),
        *((rf"\.(conv|bn){n}\.", rf".{part}.\1.") for n, part in enumerate(("reduce", "by_channel", "expand"), 1)),
        (r"\.conv\.", ".0."), (r"\.bn\.", ".1."),
    ),
    "ShuffleNetV2": (
        *STEM, (r"^conv2\.", "last.0.0."), (r"^bn2\.", "last.0.1."), (r"^linear\.", "head."),
        # The first block of a stage has two branches: convolutions 1 and 2, and 3 to 5; others have one, 1 to 3.
        *((rf"^layer(\d)\.0\.(conv|bn){n}\.", rf"stage\1.0.{part}.\2.")
          for n, part in enumerate(("left.0", "left.1", "right.0", "right.2", "right.3"), 1)),
        *((rf"^layer(\d)\.(\d+)\.(conv|bn){n}\.", rf"stage\1.\2.{part}.\3.")
          for n, part in enumerate(("right.0", "right.2", "right.3"), 1)),
        (r"\.conv\.", ".0."), (r"\.bn\.", ".1."),
    ),
})  # fmt: skip


def rename_published(net: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Give weights of the repositories' layout the names of a net's layers; None if they have no more of them then."""
    rules = next((rules for name, rules in KEYS.items() if isinstance(net, getattr(nets, name))), ())
    state, renamed = net.state_dict(), _rename(weights, rules)
    return renamed if len(renamed.keys() & state) > len(weights.keys() & state) else None


def identify_published(weights: Mapping[str, Tensor]) -> str | None:
    """Return which published net weights in the repositories' layout are of, and ours of that kind; None if none."""
    for name, (class_name, options) in NETS.items():
        renamed = _rename(weights, KEYS[class_name])
        first, head = next(iter(renamed.values())), renamed.get("head.weight")
        if renamed.keys() == weights.keys() or head is None or first.dim() != 4:
            continue
        with torch.device("meta"):
            net = getattr(nets, class_name)(**options, input_shape=(first.shape[1], 32, 32), num_classes=len(head))
        if fits(net.state_dict(), renamed):
            arguments = ", ".join(f"{option}={value!r}" for option, value in options.items())
            return f"{name} of {len(head)} classes, here {class_name}({arguments})"
    return None


def _rename(weights: Mapping[str, Tensor], rules: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    renamed = {}
    for key, value in weights.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)  # noqa: PLW2901 - one change after the other
        renamed[key] = value
    return renamed


def fits(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Return whether weights have the names and shapes of a net's state, but for BatchNorm's counts of batches."""
    names, theirs = ({key: x.shape for key, x in w.items() if not key.endswith(COUNT)} for w in (state, weights))
    return names == theirs
