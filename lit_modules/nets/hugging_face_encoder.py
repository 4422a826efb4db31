"""What `AutoModel` of transformers gives of images: an embedding, and the tokens of their patches."""

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.tokens import TokenGrid

Pool = Literal["auto", "cls", "mean"]
POOLER = "pooler"
# Of a configuration: what would leave out patches, or draw positions in training.
AS_IN_EVALUATION = {"mask_ratio": 0.0} | dict.fromkeys(f"pos_embed_{name}" for name in ("shift", "jitter", "rescale"))


def encoder_config(config: Any, channels: int) -> Any:
    """Return the configuration of a model's encoder of images, that of a CLIP its vision tower's, changed in place."""
    config = getattr(config, "vision_config", config)
    for option, value in {"num_channels": channels, **AS_IN_EVALUATION}.items():
        if hasattr(config, option):
            setattr(config, option, value)
    return config


def leave_out_unused(model: nn.Module, missing: list[str], pool: Pool) -> list[str]:
    """Leave out a pooler that is not to be used, and freeze what masks patches; return missing weights but a pooler's.

    Raises:
        BadInput: it is to be used, and the weights have none, as those of DINO and of a classifier.
    """
    if pool != "auto" and isinstance(getattr(model, POOLER, None), nn.Module):
        setattr(model, POOLER, None)
    for name, p in model.named_parameters():
        if name.endswith("mask_token"):
            p.requires_grad_(False)
    rest = [key for key in missing if not key.startswith(f"{POOLER}.")]
    if pool == "auto" and len(rest) < len(missing):
        raise BadInput("pool", pool, "cls or mean: its weights have no pooler, which would be new")
    return rest


def encoder_options(config: Any, parameters: Collection[str], images: Tensor) -> dict[str, Any]:
    """Return what an encoder's forward, of these parameters, needs beside images (B, C, H, W)."""
    options, (count, _, *sides) = dict[str, Any](), images.shape
    if "interpolate_pos_encoding" in parameters:
        size = getattr(config, "image_size", None)
        options["interpolate_pos_encoding"] = ([size, size] if isinstance(size, int) else size) != sides
    if "noise" in parameters:  # of MAE, which puts patches into its order: they stay where they are
        patches = (sides[0] // config.patch_size) * (sides[1] // config.patch_size)
        options["noise"] = torch.arange(patches, device=images.device).to(images.dtype).expand(count, -1)
    return options


def check_pool(output: Any, grid: TokenGrid | None, pool: Pool) -> None:
    """Raise BadInput if `pool_tokens` can't pool a model's output."""
    if pool == "auto" and getattr(output, "pooler_output", None) is not None:
        return
    if pool == "cls" and not (grid and grid.before):
        raise BadInput("pool", pool, "mean: the model has no class token before its patches")
    if grid is None and output.last_hidden_state.dim() == 3:
        raise BadInput("pool", pool, "a model that pools, or whose patches are a grid that can be told")


def pool_tokens(output: Any, grid: TokenGrid | None, pool: Pool) -> Tensor:
    """Return the embeddings (B, D) in a model's output: what it pools, else its class token, else the mean of patches.

    Its last hidden state is tokens (B, T, D), the patches' after `grid.before` others, or maps (B, D, H, W).
    """
    pooled, last = getattr(output, "pooler_output", None), output.last_hidden_state
    embeddings: Tensor
    if pool == "auto" and pooled is not None:
        embeddings = pooled.flatten(1)
    elif last.dim() == 4:
        embeddings = last.mean((2, 3))
    else:
        before = grid.before if grid else 0
        embeddings = last[:, 0] if before and pool != "mean" else last[:, before:].mean(1)
    return embeddings
