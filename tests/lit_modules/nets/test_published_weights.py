"""Files as RepDistiller and mdistiller save them, made here from their names of layers, load into our nets.

Each net below is written out as the arithmetic of its paper, on weights with those repositories' names, which are made
as they are asked for. What our net computes from the file equals it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from experiments import kd
from lit_modules import nets
from lit_modules.nets import ResNet, Torchvision
from lit_modules.nets.published_names import NETS
from lit_modules.nets.weights import load_weights
from tests.commands import bad_input, results

CLASSES = 7
STAGES = (1, 2, 3)


class Layout(dict[str, Tensor]):
    """Weights by their names in a file, and what layers compute with them."""

    def make(self, name: str, *shape: int) -> Tensor:
        if name not in self:
            self[name] = torch.randn(shape) / max(1, torch.Size(shape[1:]).numel()) ** 0.5
        return self[name]

    def conv(self, name: str, x: Tensor, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> Tensor:
        weight = self.make(f"{name}.weight", out, x.shape[1] // groups, kernel, kernel)
        return F.conv2d(x, weight, None, stride, kernel // 2, groups=groups)

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias, mean = (self.make(f"{name}.{part}", x.shape[1]) for part in ("weight", "bias", "running_mean"))
        variance = self.setdefault(f"{name}.running_var", 0.5 + torch.rand(x.shape[1]))
        self.setdefault(f"{name}.num_batches_tracked", torch.tensor(3))
        return F.batch_norm(x, mean, variance, weight, bias)

    def both(self, conv: str, norm: str, x: Tensor, *args: int, **options: int) -> Tensor:
        return self.norm(norm, self.conv(conv, x, *args, **options))

    def linear(self, name: str, x: Tensor) -> Tensor:
        x = x.mean((2, 3)) if x.dim() == 4 else x
        return F.linear(x, self.make(f"{name}.weight", CLASSES, x.shape[1]), self.make(f"{name}.bias", CLASSES))


def resnet(w: Layout, x: Tensor, depth: int, widths: tuple[int, ...] = (16, 16, 32, 64)) -> Tensor:
    x = w.both("conv1", "bn1", x, widths[0], 3).relu()
    for stage in STAGES:
        for i in range((depth - 2) // 6):
            name, stride = f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
            y = w.both(f"{name}.conv1", f"{name}.bn1", x, widths[stage], 3, stride).relu()
            y = w.both(f"{name}.conv2", f"{name}.bn2", y, widths[stage], 3)
            if stride > 1 or x.shape[1] != widths[stage]:
                x = w.both(f"{name}.downsample.0", f"{name}.downsample.1", x, widths[stage], 1, stride)
            x = (x + y).relu()
    return w.linear("fc", x)


def wrn(w: Layout, x: Tensor, depth: int, k: int) -> Tensor:
    x = w.conv("conv1", x, 16, 3)
    for stage in STAGES:
        width = 16 * k * 2 ** (stage - 1)
        for i in range((depth - 4) // 6):
            name, stride = f"block{stage}.layer.{i}", 2 if stage > 1 and i == 0 else 1
            active = w.norm(f"{name}.bn1", x).relu()
            y = w.norm(f"{name}.bn2", w.conv(f"{name}.conv1", active, width, 3, stride)).relu()
            y = w.conv(f"{name}.conv2", y, width, 3)
            x = y + (x if x.shape[1] == width else w.conv(f"{name}.convShortcut", active, width, 1, stride))
    return w.linear("fc", w.norm("bn1", x).relu())


def vgg(w: Layout, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    for block, (count, width) in enumerate(zip(counts, (64, 128, 256, 512, 512), strict=True)):
        for i in range(count):
            bias = w.make(f"block{block}.{3 * i}.bias", width)[:, None, None]
            x = w.norm(f"block{block}.{3 * i + 1}", w.conv(f"block{block}.{3 * i}", x, width, 3) + bias).relu()
        x = F.max_pool2d(x, 2) if block < 3 else x
    return w.linear("classifier", x)


def mobilenet(w: Layout, x: Tensor) -> Tensor:
    x = w.both("conv1.0", "conv1.1", x, 16, 3, 2).relu()
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for block, (expand, width, count, first) in enumerate(settings):
        for i in range(count):
            name, stride, inner = f"blocks.{block}.{i}.conv", first if i == 0 else 1, x.shape[1] * expand
            y = w.both(f"{name}.0", f"{name}.1", x, inner).relu()
            y = w.both(f"{name}.3", f"{name}.4", y, inner, 3, stride, groups=inner).relu()
            y = w.both(f"{name}.6", f"{name}.7", y, width // 2)
            x = x + y if stride == 1 and x.shape[1] == width // 2 else y
    return w.linear("classifier.0", w.both("conv2.0", "conv2.1", x, 1280).relu())


def shuffle(x: Tensor, groups: int) -> Tensor:
    return x.view(len(x), groups, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def shuffle_v1(w: Layout, x: Tensor) -> Tensor:
    x = w.both("conv1", "bn1", x, 24).relu()
    for stage, (count, width) in enumerate(((4, 240), (8, 480), (4, 960)), 1):
        for i in range(count):
            name, stride, groups = f"layer{stage}.{i}", 2 if i == 0 else 1, 1 if x.shape[1] == 24 else 3
            new = width - x.shape[1] if i == 0 else width
            y = shuffle(w.both(f"{name}.conv1", f"{name}.bn1", x, new // 4, groups=groups).relu(), groups)
            y = w.both(f"{name}.conv2", f"{name}.bn2", y, new // 4, 3, stride, groups=new // 4).relu()
            y = w.both(f"{name}.conv3", f"{name}.bn3", y, new, groups=3)
            x = (torch.cat([y, F.avg_pool2d(x, 3, 2, 1)], 1) if i == 0 else y + x).relu()
    return w.linear("linear", x)


def shuffle_v2(w: Layout, x: Tensor) -> Tensor:
    x = w.both("conv1", "bn1", x, 24).relu()
    for stage, (count, width) in enumerate(((4, 116), (8, 232), (4, 464)), 1):
        for i in range(count):
            name, half, channels = f"layer{stage}.{i}", width // 2, x.shape[1]
            if i == 0:
                left = w.both(f"{name}.conv1", f"{name}.bn1", x, channels, 3, 2, groups=channels)
                left, right = w.both(f"{name}.conv2", f"{name}.bn2", left, half).relu(), x
            else:
                left, right = x[:, :half], x[:, half:]
            first = 3 if i == 0 else 1
            right = w.both(f"{name}.conv{first}", f"{name}.bn{first}", right, half).relu()
            spread = f"{name}.conv{first + 1}", f"{name}.bn{first + 1}"
            right = w.both(*spread, right, half, 3, 2 if i == 0 else 1, groups=half)
            right = w.both(f"{name}.conv{first + 2}", f"{name}.bn{first + 2}", right, half).relu()
            x = shuffle(torch.cat([left, right], 1), 2)
    return w.linear("linear", w.both("conv2", "bn2", x, 1024).relu())


WIDE = (32, 64, 128, 256)
CONVOLUTIONS = {8: (1, 1, 1, 1, 1), 11: (1, 1, 2, 2, 2), 13: (2,) * 5, 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
BY_HAND: dict[str, Callable[[Layout, Tensor], Tensor]] = {
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in (8, 14, 20, 32, 44, 56, 110)},
    **{f"resnet{depth}x4": partial(resnet, depth=depth, widths=WIDE) for depth in (8, 32)},
    **{f"wrn_{depth}_{k}": partial(wrn, depth=depth, k=k) for depth in (16, 40) for k in (1, 2)},
    **{f"vgg{depth}": partial(vgg, counts=counts) for depth, counts in CONVOLUTIONS.items()},
    "MobileNetV2": mobilenet, "ShuffleV1": shuffle_v1, "ShuffleV2": shuffle_v2,
}  # fmt: skip


def saved(name: str, folder: Path, wrapper: str = "") -> tuple[str, Tensor, Tensor]:
    """A file of the repositories, images, and the logits for them."""

    def made() -> tuple[Layout, Tensor, Tensor]:
        layout, images = Layout(), torch.rand(2, 3, 32, 32)
        return layout, images, BY_HAND[name](layout, images)

    layout, images, logits = with_seed(0, made)
    file = folder / "ckpt_epoch_240.pth"
    weights = {f"{wrapper}{key}": x for key, x in layout.items()}
    torch.save({"epoch": 240, "model": weights, "optimizer": {"state": {}, "param_groups": []}}, file)
    return str(file), images, logits


def ours(name: str, **options: Any) -> nn.Module:
    kind, fixed = NETS[name]
    return with_seed(1, lambda: getattr(nets, kind)(**{**fixed, "num_classes": CLASSES, **options}))


def test_all_nets_of_the_repositories_are_known() -> None:
    assert NETS.keys() == BY_HAND.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_a_published_file_loads_strictly_and_computes_the_same(name: str, tmp_path: Path) -> None:
    file, images, logits = saved(name, tmp_path)
    net = ours(name).eval()
    assert load_weights(net, file, "teacher_ckpt") == []
    torch.testing.assert_close(net(images), logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))


@pytest.mark.parametrize("wrapper", ["module.", "module.student.", "student."])
def test_wrappers_of_a_published_net_do_not_matter(wrapper: str, tmp_path: Path) -> None:
    file, images, logits = saved("resnet8", tmp_path, wrapper)
    net = ours("resnet8").eval()
    assert load_weights(net, file, "teacher_ckpt") == []
    torch.testing.assert_close(net(images), logits, rtol=1e-4, atol=1e-4)


IS = "they are those of resnet8 of 7 classes, here ResNet(depth=8, shortcut='conv')"


@pytest.mark.parametrize(
    ("net", "fits"),
    [
        (lambda: ours("resnet14"), "this ResNet"),
        (lambda: ours("resnet8x4"), "this ResNet"),
        (lambda: ours("resnet8", num_classes=10), "this ResNet"),
        (lambda: ours("resnet8", shortcut="pad"), "this ResNet"),
        (lambda: ours("wrn_16_1"), "this WideResNet"),
        (lambda: ours("vgg8"), "this VGG"),
        (lambda: Torchvision("resnet18", (3, 32, 32), CLASSES), "this Torchvision"),
    ],
)
def test_another_net_width_or_number_of_classes_is_refused(
    net: Callable[[], nn.Module], fits: str, tmp_path: Path
) -> None:
    file, *_ = saved("resnet8", tmp_path)
    assert (
        bad_input(load_weights, net(), file, "teacher_ckpt")
        == f"teacher_ckpt {file}: expected weights that fit {fits}; {IS}"
    )


def test_unknown_layouts_say_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save({"model": {"conv1.weight": torch.zeros(3, 3, 3, 3), "fc.weight": torch.zeros(2, 3)}}, file)
    line = bad_input(load_weights, ResNet(8), str(file), "teacher_ckpt")
    assert line.startswith(f"teacher_ckpt {file}: expected weights that fit ResNet; missing: ")


def test_part_of_a_published_file_loads_where_it_fits(tmp_path: Path) -> None:
    file, *_ = saved("resnet8", tmp_path)
    net = ours("resnet8", num_classes=3)
    lines = load_weights(net, file, "teacher_ckpt", partly=True)
    assert lines == ["not loaded: head.bias, head.weight", "not in it: head.bias, head.weight"]


@pytest.mark.filterwarnings("ignore")
def test_a_published_teacher_teaches(tmp_path: Path) -> None:
    layout = Layout()
    with_seed(0, lambda: BY_HAND["resnet8"](layout, torch.rand(2, 1, 8, 8)))
    layout["fc.weight"], layout["fc.bias"] = torch.rand(10, 64), torch.rand(10)
    torch.save({"model": dict(layout)}, tmp_path / "w.pth")
    kd.main([
        "--teacher", "ResNet", "--teacher.depth", "8", "--teacher.shortcut", "conv", "--teacher_ckpt",
        str(tmp_path / "w.pth"), "--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1",
        "--trainer.limit_train_batches", "2", "--out", str(tmp_path / "run"),
    ])  # fmt: skip
    assert results(tmp_path / "run")["teacher"]["fit_seconds"] == [None]
