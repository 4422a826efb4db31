"""Wide residual nets for small images (Zagoruyko and Komodakis 2016, "Wide Residual Networks")."""

from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.base import Mean, Net, Shape, image_shape


class _Block(nn.Module):
    """Norm and ReLU before each of two 3 x 3 convolutions; a 1 x 1 convolution where the number of channels changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float, number: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(in_channels), nn.ReLU()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(out_channels), nn.ReLU()
        self.dropout = Dropout(dropout, number)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        active = self.relu1(self.norm1(x))
        y: Tensor = self.conv2(self.dropout(self.relu2(self.norm2(self.conv1(active)))))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(active)
        return y + shortcut


class WideResNet(Net):
    """WRN-d-k: 6n + 4 layers, three stages of 16k, 32k and 64k channels.

    WRN-40-2 has 2,255,156 parameters for 3 x 32 x 32 images and a hundred classes, WRN-16-2 703,284. `stages` are maps
    before the next norm, as papers compare them; `preactivations` after it, before ReLU.

    Args:
        depth: 10, 16, 22, 28, 40: any 6n + 4.
        widen: k, 1 or more.
        dropout: the probability of a zero between the convolutions of a block.
    """

    feature_layer = "stage3"
    stages = ("stage1", "stage2", "stage3")
    pooled_layer = "head<"

    def __init__(
        self, depth: int = 16, widen: int = 2, input_shape: Shape = (3, 32, 32), num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest:
            raise BadInput("depth", depth, "6n + 4, as 16, 28 or 40")
        if widen < 1:
            raise BadInput("widen", widen, "1 or more")
        self.stem = nn.Conv2d(image_shape(input_shape)[0], 16, 3, padding=1, bias=False)
        channels, stages = 16, []
        for number, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
            first = _Block(channels, width, 1 if number == 0 else 2, dropout, number * blocks)
            others = (_Block(width, width, 1, dropout, number * blocks + n) for n in range(1, blocks))
            stages.append(nn.Sequential(first, *others))
            channels = width
        self.stage1, self.stage2, self.stage3 = stages
        self.preactivations = ("stage2.0.norm1", "stage3.0.norm1", "norm")
        self.norm, self.relu, self.head = nn.BatchNorm2d(channels), nn.ReLU(), nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        x = self.stage3(self.stage2(self.stage1(self.stem(images))))  # (B, 64k, H / 4, W / 4)
        logits: Tensor = self.head(self.relu(self.norm(x)).mean((2, 3)))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        end = nn.Sequential(self.norm, self.relu, Mean(), self.head)
        return [self.stem, *self.stage1, *self.stage2, *self.stage3, end]
