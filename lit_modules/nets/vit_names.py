"""ViT's weights under the names of timm's and torchvision's vision transformers, which compute the same."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets.base import evaluating

Library = Literal["timm", "torchvision"]
# Ours as patterns, in this order, and theirs.
TIMM = {
    r"^embedding\.patches": "patch_embed.proj", r"^embedding\.tokens$": "cls_token",
    r"^embedding\.positions$": "pos_embed", r"attention\.out": "attn.proj", r"attention\.": "attn.",
    r"mlp\.0": "mlp.fc1", r"mlp\.2": "mlp.fc2",
}  # fmt: skip
TORCHVISION = {
    r"^embedding\.patches": "conv_proj", r"^embedding\.tokens$": "class_token",
    r"^embedding\.positions$": "encoder.pos_embedding", r"^blocks\.": "encoder.layers.encoder_layer_",
    r"norm(\d)": r"ln_\1", r"^norm": "encoder.ln", r"^head": "heads.head", r"mlp\.2": "mlp.3",
    r"attention\.qkv\.": "self_attention.in_proj_", r"attention\.out": "self_attention.out_proj",
}  # fmt: skip
NAMES: dict[str, Mapping[str, str]] = {"timm": TIMM, "torchvision": TORCHVISION}


def rename(key: str, library: str) -> str:
    """Return a library's name for a weight of ViT."""
    for ours, theirs in NAMES[library].items():
        key = re.sub(ours, theirs, key)
    return key


def library_of(model: nn.Module) -> str:
    """Return the library whose vision transformer a model is; BadInput for another model."""
    library = type(model).__module__.partition(".")[0]
    if library in NAMES and type(model).__name__ == "VisionTransformer":
        return library
    raise BadInput("model", type(model).__name__, "a VisionTransformer of timm or torchvision")


def check_same(net: nn.Module, model: nn.Module) -> None:
    """Raise BadInput unless both have the same logits for an image, up to rounding."""
    shape: Any = net.init_args["input_shape"]  # type: ignore[index]
    first = next(model.parameters())
    image = with_seed(0, lambda: torch.randn(1, *shape)).to(first)
    with evaluating(net), evaluating(model):
        ours, theirs = net.to(first.device)(image), model(image)
    rounding = 1e-4 if first.dtype.itemsize > 2 else 0.1
    if not torch.allclose(ours, theirs, rounding, rounding * float(theirs.abs().max())):
        expected = (
            f"a plain ViT of {type(model).__module__.partition('.')[0]}: exact GELU, epsilon 1e-6, no other norms"
        )
        raise BadInput("model", type(model).__name__, expected)


def read_settings(model: Any) -> dict[str, Any]:
    """Return the options of ViT with which it computes what a model of timm or torchvision does."""
    if library_of(model) == "torchvision":
        attention, channels = model.encoder.layers[0].self_attention, model.conv_proj.in_channels
        depth, hidden, head = len(model.encoder.layers), model.mlp_dim, model.heads.head
        heads, patch, height, width = attention.num_heads, model.patch_size, model.image_size, model.image_size
    else:
        if (pool := model.global_pool) != "token":
            raise BadInput("model.global_pool", pool, "token: ViT's head reads the class token")
        (height, width), (patch, _) = model.patch_embed.img_size, model.patch_embed.patch_size
        channels, depth, head = model.patch_embed.proj.in_channels, len(model.blocks), model.head
        heads, hidden = model.blocks[0].attn.num_heads, model.blocks[0].mlp.fc1.out_features
    width_of_tokens = head.in_features
    if hidden % width_of_tokens:
        raise BadInput("model", f"an MLP of {hidden}", f"one of a multiple of {width_of_tokens}, the tokens' width")
    return {
        "patch_size": patch, "embed_dim": width_of_tokens, "num_layers": depth, "num_heads": heads,
        "mlp_ratio": hidden // width_of_tokens, "input_shape": (channels, height, width),
        "num_classes": head.out_features,
    }  # fmt: skip


def from_library(net: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a ViT from the weights of a model; BadInput if it has other ones."""
    library, theirs, state = library_of(model), dict(model.state_dict()), {}
    for key in net.state_dict():
        name = rename(key, library)
        if name not in theirs:
            raise BadInput("model", type(model).__name__, f"a plain ViT of {library}: with {name}")
        state[key] = theirs.pop(name)
    if theirs:
        raise BadInput("model", type(model).__name__, f"a plain ViT of {library}: without {next(iter(theirs))}")
    return state
