"""The blocks of a transformer by their options."""

from typing import Any

from torch import nn

from lit_modules.nets.base import check_sizes
from lit_modules.nets.block_options import BlockOptions
from lit_modules.nets.mixers import make_mixer
from lit_modules.nets.mlps import MixtureOfExperts, token_mlp
from lit_modules.nets.norms import token_norm
from lit_modules.nets.transformer import Block


def make_block(options: BlockOptions, number: int) -> Block:
    """Return the block `number`, from 0."""
    return Block(**block_arguments(options, number))


def block_arguments(options: BlockOptions, number: int) -> dict[str, Any]:
    """Return the arguments of `Block` for the block `number`, from 0; modules are made in a fixed order."""
    o = options
    check_sizes(mlp_ratio=o.mlp_ratio)
    mixer = make_mixer(o, number)
    return {
        "attention": mixer, "mlp_ratio": o.mlp_ratio, "dropout": o.dropout, "bias": o.bias, "layer": 1 + 2 * number,
        "norm_eps": o.norm_eps, "mlp": make_mlp(o, number), "make_norm": lambda: make_norm(o),
        "norm_place": o.norm_place, "layer_scale": o.layer_scale,
    }  # fmt: skip


def make_mlp(options: BlockOptions, number: int) -> nn.Module:
    """Return the MLP, or the mixture of experts, of the block `number`, from 0."""
    o = options
    if o.mlp != "moe":
        return token_mlp(o.mlp, o.embed_dim, o.hidden, o.bias, o.mlp_ratio)
    return MixtureOfExperts(o.embed_dim, o.hidden, o.experts, o.top_k, o.renormalise, o.router_noise, number, o.balance)


def make_norm(options: BlockOptions) -> nn.Module:
    """Return a norm as the blocks have it."""
    o = options
    return token_norm(o.norm, o.embed_dim, o.norm_eps, o.bias, o.unit_offset)


def make_last_norm(options: BlockOptions) -> nn.Module:
    """Return the norm after the last block, which ends in one if its norms come after sums."""
    return nn.Identity() if options.norm_place == "post" else make_norm(options)
