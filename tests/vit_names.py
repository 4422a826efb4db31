"""The vision transformers of timm and torchvision as ours, which compute the same under other names."""

import re
from typing import Any

from torch import nn

from lit_modules.nets import ViT

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


def as_vit(model: nn.Module, *sizes: Any, **options: Any) -> ViT:
    """A ViT with the weights of a model, all of them."""
    net, names = ViT(*sizes, **options), TIMM if type(model).__module__.startswith("timm") else TORCHVISION
    theirs, state = dict(model.state_dict()), {}
    for key in net.state_dict():
        name = key
        for ours, other in names.items():
            name = re.sub(ours, other, name)
        state[key] = theirs.pop(name)
    assert not theirs
    net.to(next(model.parameters()).dtype).load_state_dict(state)
    return net.train(model.training)
