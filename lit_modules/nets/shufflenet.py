"""ShuffleNet V1 (Zhang et al. 2018) and V2 (Ma et al. 2018) for small images, as distillation papers have them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Mean, Net, Shape, conv_norm, image_shape

STEM = 24
WIDTHS_BY_GROUPS = {
    1: (144, 288, 576), 2: (200, 400, 800), 3: (240, 480, 960), 4: (272, 544, 1088), 8: (384, 768, 1536),
}  # fmt: skip
WIDTHS_BY_FACTOR = {  # the last is that of the last convolution
    0.5: (48, 96, 192, 1024), 1.0: (116, 232, 464, 1024), 1.5: (176, 352, 704, 1024), 2.0: (244, 488, 976, 2048),
}  # fmt: skip


def _shuffle(x: Tensor, groups: int) -> Tensor:
    """Interleave the channels of `groups` groups of x (B, C, H, W)."""
    shuffled: Tensor = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    return shuffled


class _Grouped(nn.Module):
    """V1: a bottleneck of grouped convolutions; adds the input, or concatenates it, pooled, where maps are halved."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, groups: int) -> None:
        super().__init__()
        new_channels = out_channels - in_channels if stride == 2 else out_channels
        inner, self.groups = new_channels // 4, 1 if in_channels == STEM else groups
        self.reduce = conv_norm(in_channels, inner, groups=self.groups)
        self.by_channel = conv_norm(inner, inner, 3, stride, groups=inner)
        self.expand, self.relu = conv_norm(inner, new_channels, groups=groups), nn.ReLU()
        self.pool = nn.AvgPool2d(3, stride=2, padding=1) if stride == 2 else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        y = _shuffle(self.reduce(x).relu(), self.groups)
        y = self.expand(self.by_channel(y).relu())
        output: Tensor = self.relu(y + x if self.pool is None else torch.cat([y, self.pool(x)], 1))
        return output


class _Split(nn.Module):
    """V2: keeps half of the channels and convolves the other half; where maps are halved, convolves all in two ways."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half, entering, self.left = out_channels // 2, out_channels // 2, None
        if stride == 2:
            entering = in_channels
            by_channel = conv_norm(in_channels, in_channels, 3, 2, groups=in_channels)
            self.left = nn.Sequential(by_channel, conv_norm(in_channels, half), nn.ReLU())
        self.right = nn.Sequential(
            conv_norm(entering, half), nn.ReLU(), conv_norm(half, half, 3, stride, groups=half), conv_norm(half, half)
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        if self.left is not None:
            left, right = self.left(x), x
        else:
            left, right = x.chunk(2, 1)  # outputs of a ReLU, so that the next ReLU does not change the left half
        return _shuffle(self.relu(torch.cat([left, self.right(right)], 1)), 2)


class _ShuffleNet(Net):
    """A stem, three stages that halve the maps, perhaps a last convolution, and a linear head."""

    feature_layer = "stage3"
    stages = ("stage1", "stage2", "stage3")
    pooled_layer = "head<"

    def __init__(
        self, input_shape: Shape, stages: Sequence[Sequence[nn.Module]], last: nn.Module, head: nn.Linear
    ) -> None:
        super().__init__()
        stem = nn.Conv2d(image_shape(input_shape)[0], STEM, 1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(STEM), nn.ReLU())
        self.stage1, self.stage2, self.stage3 = (nn.Sequential(*stage) for stage in stages)
        self.preactivations = tuple(
            f"{stage}.{len(blocks) - 1}.relu<" for stage, blocks in zip(self.stages, stages, strict=True)
        )
        self.last, self.head = last, head

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        x = self.last(self.stage3(self.stage2(self.stage1(self.stem(images)))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        end = nn.Sequential(self.last, Mean(), self.head)
        return [self.stem, *self.stage1, *self.stage2, *self.stage3, end]


class ShuffleNetV1(_ShuffleNet):
    """ShuffleNet with grouped convolutions; 949,258 parameters for 3 x 32 x 32 images and a hundred classes.

    Args:
        groups: 1, 2, 3, 4 or 8; the wider the more.
    """

    def __init__(self, groups: int = 3, input_shape: Shape = (3, 32, 32), num_classes: int = 10) -> None:
        if groups not in WIDTHS_BY_GROUPS:
            raise BadInput("groups", groups, ", ".join(map(str, WIDTHS_BY_GROUPS)))
        channels, stages = STEM, []
        for count, width in zip((4, 8, 4), WIDTHS_BY_GROUPS[groups], strict=True):
            first = _Grouped(channels, width, 2, groups)
            stages.append([first, *(_Grouped(width, width, 1, groups) for _ in range(count - 1))])
            channels = width
        super().__init__(input_shape, stages, nn.Identity(), nn.Linear(channels, num_classes))


class ShuffleNetV2(_ShuffleNet):
    """ShuffleNet V2; 1,355,528 parameters at width 1 for 3 x 32 x 32 images and a hundred classes.

    `preactivations` are the last block's channels before ReLU and shuffle, as in the code of published tables.

    Args:
        width: 0.5, 1.0, 1.5 or 2.0.
    """

    def __init__(self, width: float = 1.0, input_shape: Shape = (3, 32, 32), num_classes: int = 10) -> None:
        if width not in WIDTHS_BY_FACTOR:
            raise BadInput("width", width, ", ".join(map(str, WIDTHS_BY_FACTOR)))
        channels, stages = STEM, []
        *widths, last_width = WIDTHS_BY_FACTOR[width]
        for count, out_channels in zip((4, 8, 4), widths, strict=True):
            blocks = (_Split(out_channels, out_channels, 1) for _ in range(count - 1))
            stages.append([_Split(channels, out_channels, 2), *blocks])
            channels = out_channels
        last = nn.Sequential(conv_norm(channels, last_width), nn.ReLU())
        super().__init__(input_shape, stages, last, nn.Linear(last_width, num_classes))
