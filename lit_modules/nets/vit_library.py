"""Settings and weights of the vision transformers of timm and torchvision, as `ViT` has them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.family_weights import Names, from_family

# Kinds of modules that compute what ViT's do, by what their settings say.
KNOWN = (
    "VisionTransformer", "VisionTransformerDistilled", "Sequential", "Identity", "Dropout", "Linear", "LayerNorm",
    "GELU",
)  # fmt: skip
LIBRARIES = {
    "timm": (*KNOWN, "PatchEmbed", "Conv2d", "Block", "Attention", "Mlp", "GluMlp", "GELUTanh", "SiLU", "LayerScale",
             "DropPath"),
    "torchvision": (*KNOWN, "Conv2d", "Encoder", "EncoderBlock", "MLPBlock", "MultiheadAttention",
                    "NonDynamicallyQuantizableLinear"),
}  # fmt: skip
MLPS = {  # by timm's class of the MLP, of its activation, and how this is computed
    ("Mlp", "GELU", "none"): "gelu", ("Mlp", "GELU", "tanh"): "gelu_tanh", ("Mlp", "GELUTanh", "none"): "gelu_tanh",
    ("GluMlp", "SiLU", "none"): "swiglu", ("GluMlp", "GELU", "tanh"): "geglu", ("GluMlp", "GELUTanh", "none"): "geglu",
}  # fmt: skip
TIMM = Names(
    {"embedding.positions": "pos_embed", "embedding.patches": "patch_embed.proj", "norm": "norm", "head": "head",
     "head_dist": "head_dist"},
    "blocks.",
    {"norm1": "norm1", "norm2": "norm2", "attention.qkv": "attn.qkv", "attention.out": "attn.proj",
     "layer_scale1": "ls1", "layer_scale2": "ls2", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2",
     "mlp.gate mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
)  # fmt: skip
TORCHVISION = Names(
    {"embedding.tokens": "class_token", "embedding.positions": "encoder.pos_embedding",
     "embedding.patches": "conv_proj", "norm": "encoder.ln", "head": "heads.head"},
    "encoder.layers.encoder_layer_",
    {"norm1": "ln_1", "norm2": "ln_2", "attention.qkv.weight": "self_attention.in_proj_weight",
     "attention.qkv.bias": "self_attention.in_proj_bias", "attention.out": "self_attention.out_proj",
     "mlp.0": "mlp.0", "mlp.2": "mlp.3"},
)  # fmt: skip


def read_settings(model: Any) -> dict[str, Any]:
    """Return the options of ViT with which it computes what a model of timm or torchvision does."""
    library = type(model).__module__.partition(".")[0]
    if library not in LIBRARIES or type(model).__name__ not in KNOWN[:2]:
        expected = "a VisionTransformer of timm or torchvision, or timm's VisionTransformerDistilled"
        raise BadInput("model", type(model).__name__, expected)
    for name, module in model.named_modules():
        if (kind := type(module).__name__) not in LIBRARIES[library]:
            raise BadInput(f"model.{name}", kind, f"one of {', '.join(LIBRARIES[library])}")
        for noise in ("p", "drop_prob", "dropout"):
            if isinstance(rate := getattr(module, noise, 0), int | float) and rate:
                raise BadInput(".".join(filter(None, ("model", name, noise))), rate, "0: ViT has a dropout of its own")
    eps = _only("eps", (module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)))
    return {"norm_eps": eps, **(_of_timm(model) if library == "timm" else _of_torchvision(model))}


def _of_timm(model: Any) -> dict[str, Any]:
    block, embed = model.blocks[0], model.patch_embed
    if model.global_pool != "token" or not model.has_class_token:
        raise BadInput("model.global_pool", model.global_pool, "token: ViT's head reads the class token")
    if not model.num_classes:
        raise BadInput("model.num_classes", 0, "at least 1: model.reset_classifier(10) gives it a head of 10 classes")
    side, other = embed.patch_size
    if side != other:
        raise BadInput("model.patch_embed.patch_size", embed.patch_size, "as many rows as columns")
    mlps = (
        (type(x.mlp).__name__, type(x.mlp.act).__name__, getattr(x.mlp.act, "approximate", "none"))
        for x in model.blocks
    )
    if (mlp := _only("mlp.act", mlps)) not in MLPS or getattr(block.mlp, "gate_last", False):
        raise BadInput("model.blocks.0.mlp", " ".join(mlp), f"one of {'; '.join(map(' '.join, MLPS))}, its gate first")
    scales = _only("ls1.init_values", (getattr(x.ls1, "init_values", None) for x in model.blocks))
    return {
        "patch_size": side, "embed_dim": model.embed_dim, "num_layers": len(model.blocks),
        "num_heads": block.attn.num_heads, "hidden": block.mlp.fc2.in_features, "mlp": MLPS[mlp],
        "distillation_token": (is_distilled := hasattr(model, "dist_token")),
        "registers": 0 if is_distilled else model.num_reg_tokens,
        "layer_scale": scales, "qkv_bias": block.attn.qkv.bias is not None,
        "position": None if model.pos_embed is None else "learned",
        "input_shape": (embed.proj.in_channels, *embed.img_size), "num_classes": model.num_classes,
    }  # fmt: skip


def _of_torchvision(model: Any) -> dict[str, Any]:
    return {
        "patch_size": model.patch_size, "embed_dim": model.hidden_dim, "num_layers": len(model.encoder.layers),
        "num_heads": model.encoder.layers[0].num_heads, "hidden": model.mlp_dim,
        "input_shape": (model.conv_proj.in_channels, model.image_size, model.image_size),
        "num_classes": model.num_classes,
    }  # fmt: skip


def _only(name: str, values: Iterable[Any]) -> Any:
    """Return the value that all blocks have."""
    different = {*values}
    if len(different) > 1:
        raise BadInput(f"model.{name}", sorted(map(str, different)), "the same in all blocks")
    return different.pop()


def read_weights(net: Any, model: Any) -> dict[str, Tensor]:
    """Return the state dict of ViT `net` from the weights of a model; BadInput if it has other ones."""
    ours, grid = net.state_dict(), net.token_grid
    if type(model).__module__.startswith("timm"):
        second = " dist_token" if hasattr(model, "dist_token") else " reg_token" if model.num_reg_tokens else ""
        names = TIMM._replace(outside={**TIMM.outside, "embedding.tokens": f"cls_token{second}"})
        before, size = 0 if model.no_embed_class else grid.before, model.patch_embed.grid_size
    else:
        names, before, size = TORCHVISION, 1, (model.image_size // model.patch_size,) * 2
    state = from_family(net, model, names)
    if (positions := state.get("embedding.positions")) is not None:
        state["embedding.positions"] = _place(positions, before, grid.before, size, (grid.rows, grid.columns))
    for key, value in state.items():
        if value.shape != ours[key].shape:
            raise BadInput("model", f"{key} {tuple(value.shape)}", f"{tuple(ours[key].shape)}, as the options say")
    return state


def _place(positions: Tensor, before: int, others: int, size: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample positions (1, before + patches, D) of a grid of patches; other tokens without one get 0."""
    first, patches = positions.split([before, size[0] * size[1]], 1)
    if new != size:
        maps = patches.float().mT.unflatten(2, size)  # (1, D, rows, columns)
        patches = F.interpolate(maps, new, mode="bicubic", antialias=True).flatten(2).mT.to(positions.dtype)
    return torch.cat([first if before else positions.new_zeros(1, others, positions.shape[2]), patches], 1)
