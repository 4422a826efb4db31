"""`ViT.from_library` computes what the vision transformers of timm and torchvision do, or refuses them in one line."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from lit_modules.nets import ViT
from tests import processes
from tests.commands import bad_input

SIZES: dict[str, Any] = {"patch_size": 4, "num_classes": 7, "embed_dim": 16, "depth": 2, "num_heads": 2}


def spread(model: nn.Module) -> Any:
    """The model in float64, with weights so large that each part of it matters."""
    generator = torch.Generator().manual_seed(1)
    for p in model.double().eval().parameters():
        nn.init.normal_(p, std=0.2, generator=generator)
    return model


def check(model: Any, shape: tuple[int, ...] = (3, 16, 16)) -> None:
    """Logits and gradients are the library's, also of nets that are built again from their settings."""
    net = ViT.from_library(spread(model))
    assert not net.training
    again = ViT(**net.init_args).double().eval()
    again.load_state_dict(net.state_dict())
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theirs = model(images)
    theirs.square().sum().backward()
    again(images).square().sum().backward()
    torch.testing.assert_close(net(images), theirs, rtol=0, atol=1e-10)
    gradients = copy.deepcopy(model)
    for p, q in zip(model.parameters(), gradients.parameters(), strict=True):
        q.data = p.grad
    expected = dict(ViT.from_library(gradients).named_parameters())
    first = net.num_tokens if getattr(model, "no_embed_class", False) else 0  # these have no positions there
    for key, p in again.named_parameters():
        ours, theirs = (x[:, first:] if "positions" in key else x for x in (p.grad, expected[key].data))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, msg=key)


def test_it_is_torchvisions() -> None:
    sizes = (16, 4, 2, 2, 16, 64)
    check(VisionTransformer(*sizes, num_classes=7))
    check(VisionTransformer(*sizes, num_classes=7, norm_layer=partial(nn.LayerNorm, eps=1e-3)))
    refused = bad_input(ViT.from_library, VisionTransformer(*sizes, dropout=0.1))
    assert refused.startswith("model.dropout 0.1: expected 0: ViT has a dropout of its own")
    assert bad_input(ViT.from_library, nn.Linear(1, 1)).startswith("model Linear: expected a VisionTransformer of timm")


def _timm(_: Any) -> None:
    import timm
    from timm.layers import SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled as Distilled
    from timm.models.vision_transformer import VisionTransformer as Timm

    make = partial(Timm, img_size=16, **SIZES)
    registers: dict[str, Any] = {"reg_tokens": 3, "no_embed_class": True, "init_values": 0.5}
    giant: dict[str, Any] = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 3.0}
    check(make())
    check(make(act_layer="gelu_tanh", norm_layer=partial(nn.LayerNorm, eps=1e-4), qkv_bias=False))
    check(Distilled(img_size=16, **SIZES))
    check(make(init_values=1e-5))
    check(make(**registers))
    check(make(**registers | {"no_embed_class": False}))
    check(make(**registers, **giant))
    check(make(pos_embed="none", img_size=(8, 12)), (3, 8, 12))
    _resampled([make(), make(**registers), make(img_size=(12, 20)), Distilled(img_size=16, **SIZES)])
    for options, message in (
        ({"num_classes": 0}, "model.num_classes 0: expected at least 1: model.reset_classifier(10) gives it a head"),
        ({"patch_size": (4, 2)}, "model.patch_embed.patch_size (4, 2): expected as many rows as columns"),
        ({"global_pool": "avg"}, "model.global_pool avg: expected token: ViT's head reads the class token"),
        ({"qk_norm": True}, "model VisionTransformer: expected a model without blocks.0.attn.k_norm.bias"),
        ({"pre_norm": True}, "model VisionTransformer: expected a model with patch_embed.proj.bias"),
        ({"final_norm": False}, "model VisionTransformer: expected a model with norm.weight"),
        ({"act_layer": "relu"}, "model.blocks.0.mlp.act ReLU: expected one of VisionTransformer, "),
        ({"norm_layer": "rmsnorm"}, "model.blocks.0.norm1 RmsNorm: expected one of VisionTransformer, "),
        ({"mlp_layer": SwiGLUPacked}, "model.blocks.0.mlp GluMlp GELU none: expected one of Mlp GELU none; "),
        ({"proj_drop_rate": 0.1}, "model.blocks.0.attn.proj_drop.p 0.1: expected 0"),
        ({"drop_path_rate": 0.5}, "model.blocks.1.drop_path1.drop_prob 0.5: expected 0"),
    ):
        refused = bad_input(ViT.from_library, make(**options))
        assert refused.startswith(message), refused
    assert bad_input(ViT.from_library, make(), input_shape=(1, 16, 16)).startswith(
        "model embedding.patches.weight (16, 3"
    )
    with torch.device("meta"):
        for name in ("deit_tiny_distilled_patch16_224", "vit_giant_patch14_reg4_dinov2", "deit3_small_patch16_224"):
            model = timm.create_model(name, num_classes=5)
            assert len(ViT.from_library(model).blocks) == len(model.blocks)


def _resampled(models: list[Any]) -> None:
    """Other sizes of images are as timm's `set_input_size`, bit for bit."""
    for model in map(spread, models):
        images = torch.randn(2, 3, 24, 8, dtype=torch.float64)
        net = ViT.from_library(model, input_shape=(3, 24, 8))
        model.set_input_size((24, 8))
        assert all(x.equal(net.state_dict()[key]) for key, x in ViT.from_library(model).state_dict().items())
        torch.testing.assert_close(net(images), model(images), rtol=0, atol=1e-10)


@pytest.mark.extras("timm")
def test_it_is_timms(tmp_path: Any) -> None:
    run = processes.Run(_timm, tmp_path, log=tmp_path / "log")
    assert run.wait() == 0, run.output
