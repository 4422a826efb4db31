"""The nets are what their papers and tutorials say they are."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from apprentice import replicas
from apprentice.errors import BadInput
from apprentice.keyed import noise, with_seed
from lit_modules.nets import (
    DeepNN,
    LightNN,
    Outputs,
    ResNet,
    RNNClassifier,
    SelfAttention,
    Torchvision,
    ViT,
    any_kernel,
    check_fits,
    check_same_start,
    globalise,
    pipeline_stages,
    run,
    stage_of,
)
from lit_modules.nets.base import group_norm
from lit_modules.nets.torchvision import chain


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_the_tutorials_nets() -> None:
    assert parameters(DeepNN()) == 1_186_986
    assert parameters(LightNN()) == 267_738
    light = with_seed(42, LightNN)
    assert light.features[0].weight.norm().item() == 2.327361822128296


def test_seeded_is_manual_seed_and_leaves_the_state_alone() -> None:
    before = torch.get_rng_state()
    ours = with_seed(5, lambda: LightNN((1, 8, 8)))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        plain = LightNN((1, 8, 8))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


class Odd(nn.Module):
    """A net whose state has NaN, a layer without a shape yet, and more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.counts = nn.LazyLinear(3), nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("unknown", torch.full((2,), torch.nan))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}


def test_states_of_any_kind_are_compared() -> None:
    check_same_start(Odd(), Odd())
    other = Odd()
    other.counts.data[1] += 1
    with pytest.raises(BadInput, match="differ in counts"):
        check_same_start(Odd(), other)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (3, 30, 20)])
@pytest.mark.parametrize("make", [DeepNN, LightNN, lambda **k: ResNet(8, **k)])
def test_nets_adapt_to_the_images(make: type[nn.Module], shape: tuple[int, int, int]) -> None:
    net = make(input_shape=shape, num_classes=7)
    assert net(torch.randn(2, *shape)).shape == (2, 7)
    assert net(torch.randn(0, *shape)).shape == (0, 7)  # a rank's share of a batch may be empty


@pytest.mark.parametrize(
    ("depth", "count"), [(8, 75_290), (20, 269_722), (32, 464_154), (56, 853_018), (110, 1_727_962)]
)
def test_resnets_have_the_papers_sizes(depth: int, count: int) -> None:
    assert parameters(ResNet(depth)) == count


def test_resnet_refuses_other_depths() -> None:
    with pytest.raises(ValueError, match=r"6n \+ 2"):
        ResNet(21)


def test_default_features_are_the_last_maps() -> None:
    x = torch.randn(2, 3, 32, 32)
    shapes = {type(n).__name__: tuple(run(n, x, {"default"}).features["default"].shape) for n in (DeepNN(), LightNN())}
    assert shapes == {"DeepNN": (2, 32, 8, 8), "LightNN": (2, 16, 8, 8)}
    out = run(ResNet(8), x, {"stage1", "stage3.0"})
    assert isinstance(out, Outputs)
    assert {k: tuple(v.shape) for k, v in out.features.items()} == {
        "stage1": (2, 16, 32, 32),
        "stage3.0": (2, 64, 8, 8),
    }


def test_a_layer_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(BadInput, match=r"conv9.*LightNN.*features\.0"):
        run(LightNN(), torch.randn(1, 3, 32, 32), {"conv9"})


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "squeezenet1_1"])
def test_torchvision_models_take_grey_images_and_any_head(name: str) -> None:
    net = Torchvision(name, input_shape=(1, 32, 32), num_classes=5).eval()
    out = run(net, torch.randn(2, 1, 32, 32), {"default"})
    assert out.logits.shape == (2, 5)
    assert out.features["default"].dim() == 4


def test_torchvision_says_what_it_cannot_do() -> None:
    with pytest.raises(BadInput, match=r"resnet18"):
        Torchvision("resnet81")
    with pytest.raises(BadInput, match=r"alexnet: .*32 x 32.*it says: .*too small"):
        Torchvision("alexnet")
    with pytest.raises(BadInput, match="1 or 3 channels"):
        Torchvision("resnet18", input_shape=(2, 32, 32))


def test_global_batch_norm_keeps_names_weights_and_one_process_bits() -> None:
    plain, ours = with_seed(0, lambda: ResNet(8)), globalise(with_seed(0, lambda: ResNet(8)))
    x = torch.randn(5, 3, 32, 32)
    assert torch.equal(plain(x), ours(x))
    assert list(plain.state_dict()) == list(ours.state_dict())
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_global_batch_norm_takes_one_value_a_channel() -> None:
    norm = globalise(nn.Sequential(nn.BatchNorm2d(3)))
    assert torch.equal(norm(torch.randn(1, 3, 1, 1)), torch.zeros(1, 3, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_global_statistics_are_those_of_all_replicas_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 4, 32, 32, dtype=torch.float64) * 3 + 5
    plain = nn.BatchNorm2d(4).double()
    expected = plain(torch.cat([x, x]))[:64]
    ours = globalise(nn.Sequential(nn.BatchNorm2d(4).double()))
    monkeypatch.setattr(replicas, "count", lambda: 2)  # the other rank has the same rows
    monkeypatch.setattr(replicas, "all_gather", lambda y: torch.stack([y, y]))
    # 131,072 values a channel are more than half precision can count.
    atol = 1e-9 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(ours(x.to(dtype)).double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(ours[0].running_var, plain.running_var, rtol=0, atol=atol)
    torch.testing.assert_close(ours[0].running_mean, plain.running_mean, rtol=0, atol=atol)


def in_stages(net: nn.Module, x: torch.Tensor, paths: set[str]) -> Outputs:
    """The net run stage by stage, with features caught where `stage_of` says."""
    stages = pipeline_stages(net)
    places = {path: stage_of(net, stages, path) for path in paths}
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
    return Outputs(x, features)


CUT = {
    "DeepNN": (lambda: DeepNN((3, 16, 16)), {"default", "features.3", "classifier.0", "classifier"}, 15),
    "LightNN": (lambda: LightNN((3, 16, 16)), {"default", "features.0"}, 11),
    "ResNet": (lambda: ResNet(14), {"default", "stage3.0.conv1", "stage1", "stem.0", "head"}, 8),
    "group": (lambda: ResNet(8, norm="group"), {"default", "stage3.0.norm2"}, 5),
    "resnet18": (lambda: Torchvision("resnet18"), {"default", "model.layer2.0.bn1", "model.fc", "model.bn1"}, 15),
    "resnet50": (lambda: Torchvision("resnet50", norm="group"), {"default"}, 23),
    "mobilenet_v2": (lambda: Torchvision("mobilenet_v2", (1, 32, 32)), {"default", "model.features.2.conv"}, 23),
    "Sequential": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Flatten())), {"1", "0"}, 3),
    "RNNClassifier": (lambda: RNNClassifier(dropout=0.5), {"default", "head.0"}, 3),
    "ViT": (lambda: ViT(dropout=0.1, distillation_token=True), {"default", "blocks.1", "head", "head_dist"}, 6),
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
    for compute in (run, in_stages):
        with noise(seed=3, step=1, rows=torch.arange(4)):
            found.append(compute(net, x, paths))
    assert len(pipeline_stages(net)) == count
    assert torch.equal(found[0].logits, found[1].logits)
    assert found[0].features.keys() == found[1].features.keys() == paths
    assert all(torch.equal(found[0].features[path], found[1].features[path]) for path in paths)
    assert list(net.state_dict()) == names


@pytest.mark.parametrize(("name", "size"), [("resnet34", 32), ("vgg11_bn", 32), ("alexnet", 64)])
def test_every_weight_of_a_torchvision_model_is_in_one_stage(name: str, size: int) -> None:
    net = Torchvision(name, (3, size, size)).eval()
    stages = pipeline_stages(net)
    inside = [p for stage in stages for p in stage.parameters()]
    assert len(inside) == len(set(inside)) == len(list(net.parameters()))
    x = torch.randn(2, 3, size, size)
    assert torch.equal(nn.Sequential(*stages)(x), net(x))


def test_no_stage_begins_in_place() -> None:
    # It would change what it received, which backward, or an objective that compares features, has yet to read.
    for stage in pipeline_stages(Torchvision("vgg11_bn")):
        assert not getattr(next(iter(stage.children()), stage), "inplace", False)


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(BadInput, match=r"^--name vit_b_16: expected .*resnet50.*vit_b_16 can't be cut"):
        pipeline_stages(Torchvision("vit_b_16"))
    with pytest.raises(BadInput, match=r"^--net Bilinear: expected .*pipeline_stages"):
        pipeline_stages(nn.Bilinear(2, 2, 2))
    net = Torchvision("resnet18")
    with pytest.raises(BadInput, match=r"^--layer model: expected a layer of Torchvision inside a pipeline stage"):
        stage_of(net, pipeline_stages(net), "model")


def test_group_norm_has_at_most_32_groups_of_at_least_8_channels() -> None:
    groups = {channels: group_norm(channels).num_groups for channels in (7, 16, 64, 100, 144, 2048)}
    assert groups == {7: 1, 16: 2, 64: 8, 100: 10, 144: 18, 2048: 32}


def test_group_norm_takes_the_place_of_every_batch_norm() -> None:
    for batch, group in ((ResNet(8), ResNet(8, norm="group")), (Torchvision(), Torchvision(norm="group"))):
        norms = [name for name, m in batch.named_modules() if isinstance(m, nn.BatchNorm2d)]
        assert [name for name, m in group.named_modules() if isinstance(m, nn.GroupNorm)] == norms
        assert parameters(batch) == parameters(group)
    for name in ("vgg11_bn", "vit_b_16"):
        with pytest.raises(BadInput, match=rf"^--norm group: expected batch for {name}"):
            Torchvision(name, norm="group")
    with pytest.raises(ValueError, match=r"^norm layer: expected batch or group"):
        ResNet(8, norm="layer")


def test_a_text_is_classified_by_its_tokens_and_not_by_its_padding() -> None:
    net = with_seed(0, lambda: RNNClassifier(num_classes=3)).double()
    logits = net(torch.tensor(TEXTS))
    assert logits.shape == (4, 3)
    for text, expected in zip(TEXTS[:3], logits, strict=False):
        short = text[: max(place for place, token in enumerate(text, 1) if token)]
        states, last = net.gru.cells(net.embedding.table(torch.tensor([short])))
        assert torch.equal(states[:, -1], last[0])
        torch.testing.assert_close(net.head(last[0])[0], expected, rtol=0, atol=1e-12)
    assert net(torch.zeros(0, 5, dtype=torch.uint8)).shape == (0, 3)
    with pytest.raises(ValueError, match=r"^input_shape \(1, 8, 8\): expected \(T,\), texts"):
        RNNClassifier(input_shape=(1, 8, 8))


class _Odd(nn.Module):
    """Not a chain of its children, in one of several ways."""

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
        with_seed(0, lambda: chain(_Odd(way), torch.randn(8, 4)))


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
    check_fits(net.double(), example, (3,))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before[0].items())
    assert [m.training for m in net.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    with pytest.raises(BadInput, match=r"^--student _Noisy: expected a net that gives logits \(3,\).*; it gives tuple"):
        check_fits(_Noisy(pair=True), example, (3,), "student")
    check_fits(_Noisy(pair=True), example, (3,), trained=False)


def test_a_net_that_fails_without_a_message_is_refused_in_one_line() -> None:
    def forward(images: torch.Tensor) -> None:
        raise ValueError

    net = LightNN()
    net.forward = forward  # type: ignore[method-assign,assignment]
    with pytest.raises(BadInput, match=r"^--net LightNN: expected a net that takes inputs .*; it says: ValueError$"):
        check_fits(net, torch.zeros(2, 3, 32, 32), (10,))


def test_shapes_can_be_learned_where_another_device_s_kernel_is_missing() -> None:
    net = ViT(backend="cudnn", embed_dim=16, num_layers=2, num_heads=2)
    images = torch.zeros(2, 3, 32, 32)
    with any_kernel(net):
        assert net(images).shape == (2, 10)
    assert {m.backend for m in net.modules() if isinstance(m, SelfAttention)} == {"cudnn"}
    with pytest.raises(BadInput, match=r"^--backend cudnn: expected a kernel that serves"):
        net(images)
