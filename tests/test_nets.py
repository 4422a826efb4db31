"""The nets are what their papers and tutorials say they are."""

import pytest
import torch
from torch import nn

from apprentice import replicas
from apprentice.errors import BadInput
from apprentice.keyed import seeded
from lit_modules.nets import DeepNN, LightNN, Outputs, ResNet, Torchvision, globalise, run


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_the_tutorials_nets() -> None:
    assert parameters(DeepNN()) == 1_186_986
    assert parameters(LightNN()) == 267_738
    light = seeded(42, LightNN)
    assert light.features[0].weight.norm().item() == 2.327361822128296


def test_seeded_is_manual_seed_and_leaves_the_state_alone() -> None:
    before = torch.get_rng_state()
    ours = seeded(5, lambda: LightNN((1, 8, 8)))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        plain = LightNN((1, 8, 8))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


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
    with pytest.raises(BadInput, match=r"alexnet: .*32 x 32.*smallest.*64 x 64"):
        Torchvision("alexnet")
    with pytest.raises(BadInput, match="1 or 3 channels"):
        Torchvision("resnet18", input_shape=(2, 32, 32))


def test_global_batch_norm_keeps_names_weights_and_one_process_bits() -> None:
    plain, ours = seeded(0, lambda: ResNet(8)), globalise(seeded(0, lambda: ResNet(8)))
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
    monkeypatch.setattr(replicas, "gathered", lambda y: torch.stack([y, y]))
    # 131,072 values a channel are more than half precision can count.
    atol = 1e-9 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(ours(x.to(dtype)).double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(ours[0].running_var, plain.running_var, rtol=0, atol=atol)
    torch.testing.assert_close(ours[0].running_mean, plain.running_mean, rtol=0, atol=atol)
