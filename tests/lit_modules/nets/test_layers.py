"""Layers have names that every net of ours knows; inputs of modules are seen too."""

from typing import Any

import pytest
import torch
from torch import nn

from apprentice.errors import BadInput
from lit_modules.distillation import Distillation
from lit_modules.nets import GPT, DeepNN, LightNN, ResNet, RNNClassifier, Torchvision, ViT, run
from lit_modules.nets.layers import resolve
from lit_modules.objectives import Objective, Term
from tests.training import SHAPE, net

IMAGES: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "DeepNN": (
        DeepNN,
        {
            "stage1": (64, 16, 16),
            "stage-1": (32, 8, 8),
            "pooled": (2048,),
            "stage1.pre": (64, 32, 32),
            "default": (32, 8, 8),
        },
    ),
    "LightNN": (LightNN, {"stage1": (16, 16, 16), "stage2": (16, 8, 8), "pooled": (1024,), "default": (16, 8, 8)}),
    "ResNet": (
        lambda: ResNet(14),
        {"stage1": (16, 32, 32), "stage-1": (64, 8, 8), "stage3.0": (64, 8, 8), "pooled": (64,)},
    ),
    "ViT": (ViT, {"stage1": (64, 8, 8), "stage-1": (64, 8, 8), "pooled": (64,), "default": (64, 8, 8)}),
    "resnet18": (
        Torchvision,
        {"stage1": (64, 8, 8), "stage4": (512, 1, 1), "pooled": (512,), "stage2.pre": (128, 4, 4)},
    ),
    "vgg11": (lambda: Torchvision("vgg11"), {"stage1": (64, 32, 32), "stage-1": (512, 1, 1), "pooled": (25088,)}),
    "mobilenet_v2": (lambda: Torchvision("mobilenet_v2"), {"stage-1": (1280, 1, 1), "pooled": (1280,)}),
}


@pytest.mark.parametrize("name", IMAGES)
def test_layers_of_nets_of_images(name: str) -> None:
    make, shapes = IMAGES[name]
    found = run(make().eval(), torch.rand(2, 3, 32, 32), set(shapes)).features
    assert {key: tuple(x.shape[1:]) for key, x in found.items()} == shapes


def test_layers_of_nets_of_tokens() -> None:
    tokens = torch.randint(9, (2, 6))
    found = run(GPT(9, 6, embed_dim=8).eval(), tokens, {"stage1", "stage-1", "pooled", "default"}).features
    assert {tuple(x.shape) for x in found.values()} == {(2, 6, 8)}
    assert torch.equal(found["default"], found["pooled"])  # the head's input is the last norm's output
    found = run(RNNClassifier(input_shape=(6,)).eval(), tokens, {"stage1", "pooled"}).features
    assert {tuple(x.shape) for x in found.values()} == {(2, 128)}


@pytest.mark.parametrize("make", [lambda: ResNet(14), Torchvision])
def test_a_stage_is_the_relu_of_its_preactivation(make: Any) -> None:
    found = run(make().eval(), torch.rand(2, 3, 32, 32), {"stage2", "stage2.pre"}).features
    assert found["stage2.pre"].min() < 0
    assert torch.equal(found["stage2.pre"].relu(), found["stage2"])


def test_what_a_module_gets_is_seen_before_it_works_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    found = run(model, x, {"1<", "2<"}).features
    assert torch.equal(found["1<"], model[0](x))
    assert torch.equal(found["2<"], found["1<"].relu())


def test_a_net_without_the_layer_says_which_it_has() -> None:
    assert resolve(nn.Sequential(nn.Linear(1, 1)), "stage1") == ""
    for name in ("stage4", "stage-4", "nothing", "nothing<", ""):
        shown = name or "''"
        with pytest.raises(BadInput, match=rf"^layer {shown}: expected a layer of ResNet .*; it has stem, "):
            run(ResNet(8), torch.rand(1, 3, 32, 32), {name})


class Between(Objective):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.student_layers = self.teacher_layers = {name: name for name in names}

    def forward(self, student: Any, teacher: Any, labels: Any) -> Any:
        both = [(student.features[name], teacher.features[name]) for name in self.student_layers.values()]
        return {name: Term((a - b).flatten(1).square().mean(1), 1.0) for name, (a, b) in zip("xyz", both, strict=False)}


def test_pipeline_stages_see_the_same_layers() -> None:
    nets = [net(ResNet, seed, depth=8) for seed in (0, 1)]
    module = Distillation(nets[1], {"a": (nets[0], Between("stage1", "stage3.pre", "pooled"))}, input_shape=SHAPE)
    x = torch.rand(3, *SHAPE)
    module.eval()
    module.teacher.eval()
    expected = module(x)[1]["a"]
    y: Any = (x,)
    for stage in module.pipeline_stages():
        y = stage(*y)
    found = y[1]["a"]
    assert found.features.keys() == expected.features.keys()
    assert all(torch.equal(found.features[key], x) for key, x in expected.features.items())
