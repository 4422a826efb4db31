"""The nets are what their papers and tutorials say they are."""

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from apprentice import replicas
from apprentice.errors import BadInput
from apprentice.keyed import noise, with_seed
from lit_modules import nets
from lit_modules.classifier import LitClassifier
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets.base import group_norm
from lit_modules.nets.layers import layer, resolve
from lit_modules.nets.torchvision import split_chain
from lit_modules.objectives import NST, VID, AttentionTransfer, FitNet
from tests.language import gpt


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_the_tutorials_nets() -> None:
    assert parameters(nets.DeepNN()) == 1_186_986
    assert parameters(nets.LightNN()) == 267_738
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        plain = nets.LightNN()
    light = with_seed(42, nets.LightNN)
    assert all(map(torch.equal, light.parameters(), plain.parameters()))
    assert light.features[0].weight.norm().item() == pytest.approx(2.3273618, rel=1e-6)


class Odd(nn.Module):
    """A net whose state has NaN, a layer without a shape yet, and more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.counts = nn.LazyLinear(3), nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("unknown", torch.full((2,), torch.nan))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}


def test_states_of_any_kind_are_compared() -> None:
    nets.check_same_start(Odd(), Odd())
    other = Odd()
    other.counts.data[1] += 1
    with pytest.raises(BadInput, match="differ in counts"):
        nets.check_same_start(Odd(), other)


@pytest.mark.parametrize(
    ("depth", "count"), [(8, 75_290), (20, 269_722), (32, 464_154), (56, 853_018), (110, 1_727_962)]
)
def test_resnets_have_the_papers_sizes(depth: int, count: int) -> None:
    assert parameters(nets.ResNet(depth)) == count


WIDE: Any = {"widths": (32, 64, 128, 256), "shortcut": "conv"}
PUBLISHED = {  # for a hundred classes, by RepDistiller's nets; WRN-40-2 as 2.2 million in its paper
    "resnet8x4": (lambda **k: nets.ResNet(8, **WIDE, **k), 1_233_540),
    "resnet32x4": (lambda **k: nets.ResNet(32, **WIDE, **k), 7_433_860),
    "resnet20": (lambda **k: nets.ResNet(20, shortcut="conv", **k), 278_324),
    "resnet56": (lambda **k: nets.ResNet(56, shortcut="conv", **k), 861_620),
    "resnet110": (lambda **k: nets.ResNet(110, shortcut="conv", **k), 1_736_564),
    "wrn_16_2": (lambda **k: nets.WideResNet(16, 2, **k), 703_284),
    "wrn_40_1": (lambda **k: nets.WideResNet(40, 1, **k), 569_780),
    "wrn_40_2": (lambda **k: nets.WideResNet(40, 2, **k), 2_255_156),
    "vgg8": (lambda **k: nets.VGG(8, **k), 3_965_028),
    "vgg13": (lambda **k: nets.VGG(13, **k), 9_462_180),
    "MobileNetV2": (lambda **k: nets.MobileNetV2(0.5, **k), 812_836),
    "ShuffleV1": (lambda **k: nets.ShuffleNetV1(3, **k), 949_258),
    "ShuffleV2": (lambda **k: nets.ShuffleNetV2(1.0, **k), 1_355_528),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_nets_of_the_published_tables_have_their_sizes(name: str) -> None:
    make, count = PUBLISHED[name]
    with torch.device("meta"):
        assert parameters(make(num_classes=100)) == count


def test_nets_of_the_classic_tutorials_have_their_sizes() -> None:
    assert (parameters(nets.LeNet()), parameters(nets.MNISTNet())) == (62_006, 21_840)
    assert parameters(nets.LightNN(widths=(8, 4), hidden=32)) == 3 * 72 + 8 + 8 * 36 + 4 + 256 * 32 + 32 + 330
    assert nets.DeepNN(widths=(8, 6, 4, 2), hidden=16)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


ACTIVE: dict[str, Any] = {
    "ResNet": lambda: nets.ResNet(8, **WIDE), "VGG": nets.VGG, "ShuffleNetV1": nets.ShuffleNetV1, "LeNet": nets.LeNet,
}  # fmt: skip


@pytest.mark.parametrize("name", [*ACTIVE, "MobileNetV2"])
def test_a_stage_is_the_relu_of_its_preactivation_if_it_ends_in_one(name: str) -> None:
    net = with_seed(0, ACTIVE.get(name, nets.MobileNetV2))
    names = [f"stage{number}{end}" for number in range(1, len(net.stages) + 1) for end in ("", ".pre")]
    found = nets.run(net, torch.randn(2, 3, 32, 32), names).features
    for after, before in zip(*(map(found.__getitem__, names[start::2]) for start in (0, 1)), strict=True):
        assert torch.equal(after, before.relu() if name in ACTIVE else before)


def test_the_preactivation_of_a_shuffled_stage_is_before_relu_and_shuffle() -> None:
    """As in the code of published tables: half of the last block's input beside the other half, convolved."""
    net = with_seed(0, lambda: nets.ShuffleNetV2(0.5)).eval()
    found = nets.run(net, torch.randn(2, 3, 32, 32), ["stage2", "stage2.pre", "stage2.6"]).features
    left, right = found["stage2.6"].chunk(2, 1)
    before = torch.cat([left, net.stage2[7].right(right)], 1)
    assert torch.equal(found["stage2.pre"], before)
    assert before.min() < 0
    assert torch.equal(found["stage2"], torch.stack([left, before[:, left.shape[1] :].relu()], 2).flatten(1, 2))


# (channels, height) of what the code of published tables calls feat[1:-1], for 32 x 32 images; FitNet reads feat[2].
MAPS = {
    "resnet8x4": [(64, 32), (128, 16), (256, 8)],
    "wrn_16_2": [(32, 32), (64, 16), (128, 8)],
    "vgg8": [(128, 16), (256, 8), (512, 4), (512, 4)],
    "vgg13": [(128, 16), (256, 8), (512, 4), (512, 4)],
    "MobileNetV2": [(12, 16), (16, 8), (48, 4), (160, 2)],
    "ShuffleV1": [(240, 16), (480, 8), (960, 4)],
    "ShuffleV2": [(116, 16), (232, 8), (464, 4)],
}


@pytest.mark.parametrize("name", MAPS)
def test_stages_are_the_maps_that_published_tables_compare(name: str) -> None:
    maps, net = MAPS[name], PUBLISHED[name][0](num_classes=10).eval()
    names = [f"stage{number}" for number in range(1, len(net.stages) + 1)]
    found = nets.run(net, torch.zeros(1, 3, 32, 32), [*names, "middle", "default"]).features
    assert [tuple(found[stage].shape[1:3]) for stage in names] == maps
    assert resolve(net, "middle") == resolve(net, "stage2")
    assert torch.equal(found["default"], found[names[-1]])
    with pytest.raises(BadInput):
        layer(net, f"stage{len(maps) + 1}")


@pytest.mark.parametrize("make", [AttentionTransfer, NST, VID])
def test_methods_of_several_maps_read_those_of_the_tables(make: Any) -> None:
    objective = make()
    objective.choose(nets.VGG(8), nets.VGG(13))
    assert [*objective.student_layers.values()] == ["stage-4", "stage-3", "stage-2", "stage-1"]
    assert FitNet().student_layers == {"student_layer": "middle"}


def test_the_preactivation_of_a_wide_residual_stage_is_behind_the_next_norm() -> None:
    net = with_seed(0, lambda: nets.WideResNet(10, 1))
    found = nets.run(
        net, torch.randn(2, 3, 32, 32), ["stage1", "stage1.pre", "stage3", "stage3.pre", "pooled"]
    ).features
    torch.testing.assert_close(found["stage1.pre"], nn.BatchNorm2d(16)(found["stage1"]))
    torch.testing.assert_close(found["stage3.pre"], nn.BatchNorm2d(64)(found["stage3"]))
    torch.testing.assert_close(found["pooled"], found["stage3.pre"].relu().mean((2, 3)))


SMALL = [(3, 32, 32), (1, 28, 28), (1, 8, 8), (3, 30, 20)]
LARGE = [(1, 28, 28), (3, 64, 48)]
ADAPTING: list[tuple[Any, tuple[int, ...]]] = [
    *itertools.product([nets.DeepNN, nets.LightNN, partial(nets.ResNet, 8)], SMALL),
    *itertools.product(
        [nets.WideResNet, nets.VGG, nets.MobileNetV2, nets.ShuffleNetV1, nets.ShuffleNetV2, nets.LeNet, nets.MNISTNet],
        LARGE,
    ),
]


@pytest.mark.parametrize(("make", "shape"), ADAPTING)
def test_nets_adapt_to_the_images(make: Any, shape: tuple[int, ...]) -> None:
    net = make(input_shape=shape, num_classes=7)
    nets.check_fits(net, torch.randn(2, *shape), (7,))
    assert net(torch.randn(0, *shape)).shape == (0, 7)  # a rank's share of a batch may be empty


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nets.WideResNet(12), r"^depth 12: expected 6n \+ 4, as 16, 28 or 40$"),
        (lambda: nets.WideResNet(16, 0), "^widen 0: expected 1 or more$"),
        (lambda: nets.ResNet(21), r"6n \+ 2"),
        (lambda: nets.ResNet(8, widths=(16, 16, 8, 8)), r"^widths \[16, 16, 8, 8\]: expected them to grow"),
        (lambda: nets.LightNN(widths=(16,)), r"^widths \[16\]: expected 2 numbers of channels, each at least 1$"),
        (lambda: nets.RNNClassifier(hidden=-1), "^hidden -1: expected at least 1$"),
        (lambda: nets.RNNClassifier(0), "^embedding_dim 0: expected at least 1$"),
        (lambda: nets.VGG(input_shape=(3, 7, 7)), "expected at least 8 x 8 pixels"),
        (lambda: nets.LeNet(input_shape=(3, 8, 8)), "expected at least 16 x 16 pixels"),
        (lambda: nets.MobileNetV2(0.0), "^width 0.0: expected 1/16 or more, at most 16$"),
        (lambda: nets.ShuffleNetV1(5), "^groups 5: expected 1, 2, 3, 4, 8$"),
        (lambda: nets.ShuffleNetV2(0.7), "^width 0.7: expected 0.5, 1.0, 1.5, 2.0$"),
        (lambda: nets.ViT(5), "^patch_size 5: expected a divisor of the images' 32 x 32 pixels"),
        (lambda: nets.ViT(0), "^patch_size 0: expected a divisor"),
        (lambda: nets.ViT(num_heads=5), "^num_heads 5: expected a divisor of embed_dim, 64"),
        (lambda: nets.ViT(num_layers=0), "^num_layers 0: expected at least 1"),
        (lambda: nets.ViT(mlp_ratio=0), "^mlp_ratio 0: expected at least 1"),
        (lambda: nets.ViT(input_shape=(64,)), r"^input_shape \(64,\): expected \(C, H, W\), images"),
        (lambda: gpt(num_layers=0), "num_layers 0: expected at least 1"),
        (lambda: gpt(vocab_size=0), "vocab_size 0: expected at least 1"),
        (lambda: gpt(dropout=1.0), "dropout 1.0: expected at least 0, less than 1"),
        (lambda: gpt(backend="fast"), "backend fast: expected one of auto, math"),
        (lambda: nets.SelfAttention(10, 3), "num_heads 3: expected a divisor of embed_dim, 10"),
        (lambda: nets.SelfAttention(4, 0), "num_heads 0: expected"),
        (lambda: nets.SelfAttention(4, 2, dropout=1.0), "dropout 1.0: expected at least 0, less than 1"),
        (lambda: nets.SelfAttention(4, 2, backend="fast"), "backend fast: expected one of auto, math, flash"),
        (lambda: LitLanguageModel(gpt(), warmup_steps=-1), "warmup_steps -1: expected a number of 0 or more"),
        (lambda: LitLanguageModel(gpt(), clip_norm=math.inf), "clip_norm inf: expected a number of 0 or more"),
        (lambda: LitLanguageModel(gpt(), betas=(0.9, 1.0)), r"betas \[0.9, 1.0\]: expected two numbers"),
    ],
)  # fmt: skip
def test_options_that_no_paper_has_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "squeezenet1_1"])
def test_torchvision_models_take_grey_images_and_any_head(name: str) -> None:
    net = nets.Torchvision(name, input_shape=(1, 32, 32), num_classes=5).eval()
    out = nets.run(net, torch.randn(2, 1, 32, 32), {"default"})
    assert out.logits.shape == (2, 5)
    assert out.features["default"].dim() == 4


def test_torchvision_says_what_it_cannot_do() -> None:
    with pytest.raises(BadInput, match=r"resnet18"):
        nets.Torchvision("resnet81")
    with pytest.raises(BadInput, match=r"alexnet: .*32 x 32.*it says: .*too small"):
        nets.Torchvision("alexnet")
    with pytest.raises(BadInput, match="1 or 3 channels"):
        nets.Torchvision("resnet18", input_shape=(2, 32, 32))


def test_global_batch_norm_keeps_names_weights_and_one_process_bits() -> None:
    plain, ours = with_seed(0, lambda: nets.ResNet(8)), nets.globalise(with_seed(0, lambda: nets.ResNet(8)))
    x = torch.randn(5, 3, 32, 32)
    assert torch.equal(plain(x), ours(x))
    assert list(plain.state_dict()) == list(ours.state_dict())
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


@pytest.mark.parametrize(
    ("norm", "dtype", "atol"),
    [
        (nn.BatchNorm2d, torch.float64, 1e-9),
        (nn.BatchNorm2d, torch.float16, 2e-2),  # 131,072 values a channel are more than half precision can count
        (BatchNormAct2d, torch.float64, 1e-9),
    ],
)
def test_statistics_are_of_all_rows(
    norm: Any, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 4, 32, 32, dtype=torch.float64) * 3 + 5
    plain, ours = norm(4).double(), nets.globalise(nets.globalise(nn.Sequential(norm(4).double())))
    expected = plain(torch.cat([x, x]))[:64]
    monkeypatch.setattr(replicas, "count", lambda: 2)  # the other rank has the same rows
    monkeypatch.setattr(replicas, "all_gather", lambda y: torch.stack([y, y]))
    torch.testing.assert_close(ours(x.to(dtype)).double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(ours[0].running_var, plain.running_var, rtol=0, atol=atol)
    torch.testing.assert_close(ours[0].running_mean, plain.running_mean, rtol=0, atol=atol)


def test_batch_norm_of_other_people_is_named() -> None:
    class Mine(nn.BatchNorm2d): ...

    with pytest.warns(UserWarning, match=r"Sequential has a BatchNorm of its own in 1: "):
        LitClassifier(nn.Sequential(nn.BatchNorm2d(2), Mine(2)))


def in_stages(net: nn.Module, x: torch.Tensor, paths: set[str]) -> nets.Outputs:
    """The net run stage by stage, with features caught where `find_stage` says."""
    stages = nets.pipeline_stages(net)
    places = {path: nets.find_stage(net, stages, path) for path in paths}
    features: dict[str, torch.Tensor] = {}
    for number, stage in enumerate(stages):
        here = [(path, module) for path, (place, module) in places.items() if place == number]
        hooks = [
            module.register_forward_hook(lambda _m, _x, y, path=path: features.__setitem__(path, y))
            for path, module in here
        ]
        x = stage(*x) if isinstance(x, tuple) else stage(x)
        assert {path for path, _ in here} <= features.keys()
        for hook in hooks:
            hook.remove()
    return nets.Outputs(x, features)


CUT = {
    "DeepNN": (lambda: nets.DeepNN((3, 16, 16)), {"default", "features.3", "classifier.0", "classifier"}, 15),
    "LightNN": (lambda: nets.LightNN((3, 16, 16)), {"default", "features.0"}, 11),
    "ResNet": (lambda: nets.ResNet(14), {"default", "stage3.0.conv1", "stage1", "stem.0", "head"}, 8),
    "group": (lambda: nets.ResNet(8, norm="group"), {"default", "stage3.0.norm2"}, 5),
    "resnet18": (lambda: nets.Torchvision("resnet18"), {"default", "model.layer2.0.bn1", "model.fc", "model.bn1"}, 15),
    "resnet50": (lambda: nets.Torchvision("resnet50", norm="group"), {"default"}, 23),
    "mobilenet_v2": (lambda: nets.Torchvision("mobilenet_v2", (1, 32, 32)), {"default", "model.features.2.conv"}, 23),
    "Sequential": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Flatten())), {"1", "0"}, 3),
    "conv": (lambda: nets.ResNet(8, shortcut="conv"), {"default", "stage2.0.shortcut"}, 5),
    "WideResNet": (lambda: nets.WideResNet(10, 1, dropout=0.3), {"default", "stage1.0.norm1", "relu"}, 5),
    "VGG": (lambda: nets.VGG(8), {"default", "stem", "stage3.2"}, 20),
    "MobileNetV2": (lambda: nets.MobileNetV2(0.25), {"default", "blocks.1.0.layers.3"}, 19),
    "ShuffleNetV1": (lambda: nets.ShuffleNetV1(2), {"default", "stage1.0.by_channel", "stage2.1.relu"}, 18),
    "ShuffleNetV2": (lambda: nets.ShuffleNetV2(0.5), {"default", "stage2.0.left", "last"}, 18),
    "LeNet": (nets.LeNet, {"default", "features.0", "classifier"}, 12),
    "MNISTNet": (lambda: nets.MNISTNet((3, 32, 32)), {"default", "features.4", "classifier.2"}, 12),
    "RNNClassifier": (lambda: nets.RNNClassifier(dropout=0.5), {"default", "head.0"}, 3),
    "ViT": (lambda: nets.ViT(dropout=0.1, distillation_token=True), {"default", "blocks.1", "head", "head_dist"}, 6),
}
SHAPES = {"DeepNN": (3, 16, 16), "LightNN": (3, 16, 16), "mobilenet_v2": (1, 32, 32)}
TEXTS = [[7, 8, 9, 0, 0], [7, 0, 8, 0, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CUT)
def test_stages_one_after_another_are_the_net_and_its_features(name: str, training: bool) -> None:
    make, paths, count = CUT[name]
    net = with_seed(0, make).to(memory_format=torch.channels_last).train(training)
    torch_dropout = [m for m in net.modules() if isinstance(m, nn.Dropout)]
    for m in torch_dropout:
        m.p = 0.0  # torch's own noise is another one each time
    x = torch.randn(4, *SHAPES.get(name, (3, 32, 32))).contiguous(memory_format=torch.channels_last)
    x = torch.tensor(TEXTS) if name == "RNNClassifier" else x
    names, found = list(net.state_dict()), []
    for compute in (nets.run, in_stages):
        with noise(seed=3, step=1, rows=torch.arange(4)):
            found.append(compute(net, x, paths))
    assert len(nets.pipeline_stages(net)) == count
    assert torch.equal(found[0].logits, found[1].logits)
    assert found[0].features.keys() == found[1].features.keys() == paths
    assert all(torch.equal(found[0].features[path], found[1].features[path]) for path in paths)
    assert list(net.state_dict()) == names


@pytest.mark.parametrize(("name", "size"), [("resnet34", 32), ("vgg11_bn", 32), ("alexnet", 64)])
def test_every_weight_of_a_torchvision_model_is_in_one_stage(name: str, size: int) -> None:
    net = nets.Torchvision(name, (3, size, size)).eval()
    stages = nets.pipeline_stages(net)
    inside = [p for stage in stages for p in stage.parameters()]
    assert len(inside) == len(set(inside)) == len(list(net.parameters()))
    x = torch.randn(2, 3, size, size)
    assert torch.equal(nn.Sequential(*stages)(x), net(x))
    # In place it would change what backward, or an objective that compares features, has yet to read.
    assert not any(getattr(next(iter(stage.children()), stage), "inplace", False) for stage in stages)


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(BadInput, match=r"^name vit_b_16: expected .*resnet50.*vit_b_16 can't be cut"):
        nets.pipeline_stages(nets.Torchvision("vit_b_16"))
    with pytest.raises(BadInput, match=r"^net Bilinear: expected .*pipeline_stages"):
        nets.pipeline_stages(nn.Bilinear(2, 2, 2))
    net = nets.Torchvision("resnet18")
    with pytest.raises(BadInput, match=r"^layer model: expected a layer of Torchvision inside a pipeline stage"):
        nets.find_stage(net, nets.pipeline_stages(net), "model")


def test_group_norm_has_at_most_32_groups_of_at_least_8_channels() -> None:
    groups = {channels: group_norm(channels).num_groups for channels in (7, 16, 64, 100, 144, 2048)}
    assert groups == {7: 1, 16: 2, 64: 8, 100: 10, 144: 18, 2048: 32}


def test_group_norm_takes_the_place_of_every_batch_norm() -> None:
    for make in (partial(nets.ResNet, 8), nets.Torchvision):
        batch, group = make(), make(norm="group")
        norms = [name for name, m in batch.named_modules() if isinstance(m, nn.BatchNorm2d)]
        assert [name for name, m in group.named_modules() if isinstance(m, nn.GroupNorm)] == norms
        assert parameters(batch) == parameters(group)
    for name in ("vgg11_bn", "vit_b_16"):
        with pytest.raises(BadInput, match=rf"^norm group: expected batch for {name}"):
            nets.Torchvision(name, norm="group")
    with pytest.raises(ValueError, match=r"^norm layer: expected batch or group"):
        nets.ResNet(8, norm="layer")


def test_a_text_is_classified_by_its_tokens_and_not_by_its_padding() -> None:
    net = with_seed(0, lambda: nets.RNNClassifier(num_classes=3)).double()
    logits = net(torch.tensor(TEXTS))
    assert logits.shape == (4, 3)
    for text, expected in zip(TEXTS[:3], logits, strict=False):
        short = text[: max(place for place, token in enumerate(text, 1) if token)]
        states, last = net.gru.cells(net.embedding.table(torch.tensor([short])))
        assert torch.equal(states[:, -1], last[0])
        torch.testing.assert_close(net.head(last[0])[0], expected, rtol=0, atol=1e-12)
    assert net(torch.zeros(0, 5, dtype=torch.uint8)).shape == (0, 3)
    with pytest.raises(ValueError, match=r"^input_shape \(1, 8, 8\): expected \(T,\), texts"):
        nets.RNNClassifier(input_shape=(1, 8, 8))


class _Odd(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.one, self.two = way, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = {
            "residual": lambda: self.two(x + self.one(x)),
            "twice": lambda: self.one(self.one(x)),
            "after": lambda: self.two(self.one(x)).relu(),
        }
        return ways[self.way]()


@pytest.mark.parametrize("way", ["residual", "twice", "after"])
def test_a_model_that_is_no_chain_of_its_children_is_found_out(way: str) -> None:
    with pytest.raises(ValueError, match=r"a child is called twice|an unknown operation between"):
        with_seed(0, lambda: split_chain(_Odd(way), torch.randn(8, 4)))


class _Noisy(nn.Module):
    """BatchNorm and torch's dropout; what it gives in training is one's own affair."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.pair = pair
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.layers(x)
        return (logits, logits) if self.pair and self.training else logits


def test_whether_a_net_fits_is_seen_in_training_too_and_changes_nothing() -> None:
    net, example = _Noisy(), torch.ones(2, 1, 2, 2)
    net.layers[3].eval()
    before = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()], torch.get_rng_state()
    nets.check_fits(net.double(), example, (3,))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before[0].items())
    assert [m.training for m in net.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    with pytest.raises(BadInput, match=r"^student _Noisy: expected a net that gives logits \(3,\).*; it gives tuple"):
        nets.check_fits(_Noisy(pair=True), example, (3,), "student")
    nets.check_fits(_Noisy(pair=True), example, (3,), trained=False)


def test_a_net_that_fails_without_a_message_is_refused_in_one_line() -> None:
    def forward(images: torch.Tensor) -> None:
        raise ValueError

    net = nets.LightNN()
    net.forward = forward  # type: ignore[method-assign,assignment]
    with pytest.raises(BadInput, match=r"^net LightNN: expected a net that takes inputs .*; it says: ValueError$"):
        nets.check_fits(net, torch.zeros(2, 3, 32, 32), (10,))


def test_shapes_can_be_learned_where_another_device_s_kernel_is_missing() -> None:
    net = nets.ViT(backend="cudnn", embed_dim=16, num_layers=2, num_heads=2)
    images = torch.zeros(2, 3, 32, 32)
    with nets.any_kernel(net):
        assert net(images).shape == (2, 10)
    assert {m.backend for m in net.modules() if isinstance(m, nets.SelfAttention)} == {"cudnn"}
    with pytest.raises(BadInput, match=r"^backend cudnn: expected a kernel that serves"):
        net(images)
