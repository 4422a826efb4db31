"""Attention layers and nets of ours beside others of the same weights and numbers, for `attention_speed.py`."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets import GPT
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.positions import Rotary
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.transformer import Block

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is timed: D and heads, of keys too; B texts of T tokens to train, a cache, long texts."""

    width: int = 256
    heads: int = 4
    key_heads: int = 2
    texts: int = 2
    length: int = 256
    window: int = 64
    cached: int = 4096
    long: int = 8192


@dataclass
class Pair:
    """Two modules of the same weights, called on the same input."""

    rival: str
    ours: nn.Module
    theirs: nn.Module
    call_ours: Call
    call_theirs: Call


class Plain(nn.Module):
    """Causal self-attention as one writes it with torch's kernel alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        return self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def write(self, x: Tensor, keys: Tensor, values: Tensor, place: int) -> Tensor:
        """Return the output of one token (B, 1, D), given buffers of those before its `place`."""
        q, keys[:, :, place : place + 1], values[:, :, place : place + 1] = self.split(x)
        end = place + 1
        mixed = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end])
        return self.out(mixed.transpose(1, 2).flatten(2))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def make(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a module from seed 0 without what its makers warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return with_seed(0, lambda: kind(*args, **options))


def torch_attention(sizes: Sizes) -> Pair:
    ours = make(SelfAttention, sizes.width, sizes.heads)
    theirs = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)
    copy_layer(ours, theirs)
    x = noise(sizes.texts, sizes.length, sizes.width)
    call = partial(theirs, x, x, x, need_weights=False)
    return Pair("MultiheadAttention", ours, theirs, partial(ours, x), lambda: call()[0])


def copy_layer(ours: SelfAttention, theirs: nn.MultiheadAttention) -> None:
    theirs.load_state_dict({
        "in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias, "out_proj.weight": ours.out.weight,
        "out_proj.bias": ours.out.bias,
    })  # fmt: skip


def torch_block(sizes: Sizes) -> Pair:
    ours = make(lambda: Block(SelfAttention(sizes.width, sizes.heads)))
    theirs = make(
        nn.TransformerEncoderLayer, sizes.width, sizes.heads, 4 * sizes.width, 0.0, "gelu", batch_first=True,
        norm_first=True,
    )  # fmt: skip
    copy_layer(ours.attention, theirs.self_attn)
    mine = {name: module for name, module in ours.named_modules() if isinstance(module, nn.Linear | nn.LayerNorm)}
    linears = [module for name, module in mine.items() if name.startswith("mlp")]
    for from_, to in zip([mine["norm1"], mine["norm2"], *linears],
                         [theirs.norm1, theirs.norm2, theirs.linear1, theirs.linear2], strict=True):  # fmt: skip
        to.load_state_dict(from_.state_dict())
    x = noise(sizes.texts, sizes.length, sizes.width)
    return Pair("TransformerEncoderLayer", ours, theirs, partial(ours, x), partial(theirs, x))


def plain(sizes: Sizes) -> Pair:
    ours = make(SelfAttention, sizes.width, sizes.heads, causal=True)
    theirs = Plain(sizes.width, sizes.heads)
    theirs.load_state_dict(ours.state_dict())
    x = noise(sizes.texts, sizes.length, sizes.width)
    return Pair("scaled_dot_product_attention", ours, theirs, partial(ours, x), partial(theirs, x))


def family(name: str, sizes: Sizes, **options: Any) -> Pair:
    """A net of two blocks of a family of transformers, and GPT with its weights."""
    import transformers

    longest = sizes.cached + sizes.length
    config = getattr(transformers, f"{name}Config")(
        vocab_size=256, hidden_size=sizes.width, num_hidden_layers=2, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads, head_dim=sizes.width // sizes.heads, intermediate_size=3 * sizes.width,
        max_position_embeddings=longest, bos_token_id=None, eos_token_id=None, pad_token_id=None, **options,
    )  # fmt: skip
    kind = transformers.AutoModelForCausalLM
    theirs = make(kind.from_config, config, attn_implementation="sdpa").train()
    ours = GPT.from_hf(theirs)
    tokens = torch.arange(sizes.texts * sizes.length).view(sizes.texts, -1) * 7 % 256
    return Pair(
        f"{name}ForCausalLM", ours, theirs, partial(ours, tokens),
        lambda: theirs(tokens, use_cache=False).logits,
    )  # fmt: skip


def rotations(start: int, end: int, width: int) -> tuple[Tensor, Tensor]:
    """Cos and sin (1, T, width) as layers of transformers take them."""
    angles = torch.arange(start, end)[:, None] * 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    return torch.cat([angles, angles], 1).cos()[None], torch.cat([angles, angles], 1).sin()[None]


def latent(sizes: Sizes) -> Pair:
    """DeepSeek-V3's attention; rotated pairs lie as in Llama's, so that weights need no reordering."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    head = sizes.width // sizes.heads
    config = deepseek.DeepseekV3Config(
        hidden_size=sizes.width, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        q_lora_rank=sizes.width, kv_lora_rank=2 * head, qk_rope_head_dim=head // 2, qk_nope_head_dim=head,
        v_head_dim=head, attention_bias=False, rope_interleave=False, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = make(deepseek.DeepseekV3Attention, config, 0)
    ours = LatentAttention(
        sizes.width, sizes.heads, True, 2 * head, sizes.width, head, head // 2, position=Rotary(), bias=False
    )
    names = {
        "query_down": "q_a_proj", "query_norm": "q_a_layernorm", "query": "q_b_proj", "latent": "kv_a_proj_with_mqa",
        "latent_norm": "kv_a_layernorm", "expand": "kv_b_proj", "out": "o_proj",
    }  # fmt: skip
    weights = theirs.state_dict()
    ours.load_state_dict({f"{mine}.weight": weights[f"{other}.weight"] for mine, other in names.items()})
    return _layers("DeepseekV3Attention", ours, theirs, sizes, head // 2)


def differential(sizes: Sizes) -> Pair:
    from transformers.models.diffllama import modeling_diffllama as diffllama

    head = sizes.width // sizes.heads
    config = diffllama.DiffLlamaConfig(
        hidden_size=sizes.width, num_attention_heads=sizes.heads, num_key_value_heads=sizes.key_heads, head_dim=head,
        attn_implementation="sdpa",
    )  # fmt: skip
    theirs = make(diffllama.DiffLlamaAttention, config, 0)
    ours = DifferentialAttention(
        sizes.width, sizes.heads, True, False, num_kv_heads=sizes.key_heads, position=Rotary(), head_dim=head
    )
    weights = theirs.state_dict()
    ours.load_state_dict({
        "qkv.weight": torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"]),
        "out.weight": weights["o_proj.weight"],
        **{f"difference.{name}": weights[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2")},
    })  # fmt: skip
    return _layers("DiffLlamaAttention", ours, theirs, sizes, head)


def _layers(rival: str, ours: nn.Module, theirs: nn.Module, sizes: Sizes, rotated: int) -> Pair:
    x = noise(sizes.texts, sizes.length, sizes.width)
    turned = rotations(0, sizes.length, rotated)
    mask = torch.full((sizes.length, sizes.length), float("-inf")).triu(1)[None, None]
    return Pair(rival, ours, theirs, partial(ours, x), lambda: theirs(x, turned, mask)[0])


def naive(name: str) -> ModuleType:
    """Import a file of flash-linear-attention's plain torch, without its kernels; BadInput without the package."""
    spec = importlib.util.find_spec("fla")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if not places:
        raise BadInput("only", "linear", "the package fla-core beside it")
    path = Path(places[0], "ops", name, "naive.py")
    file: Any = importlib.util.spec_from_file_location(f"naive_{name}", path)
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module
