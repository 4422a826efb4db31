"""GPT's weights as those of families of transformers, which join some that are apart here, and part others."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput


class Group(NamedTuple):
    """Names of weights that, one after the other, are the same here and there."""

    ours: list[str]
    theirs: list[str]
    dim: int  # along which they follow one another
    is_transposed: bool = False  # whether a weight is (in, out) there


class Names(NamedTuple):
    """The names of GPT's layers in a family; several are joined by a space."""

    outside: Mapping[str, str]
    blocks: str  # what stands before a block's number, with a dot at its end if there is one
    inside: Mapping[str, str]
    transposed: tuple[str, ...] = ()  # layers whose weight is (in, out)

    def groups(self, keys: Iterable[str]) -> Iterator[Group]:
        """Yield the groups of GPT's weights with these names."""
        seen = set[str]()
        for key in keys:
            if key not in seen:
                group = self._group(key)
                seen.update(group.ours)
                yield group

    def _group(self, key: str) -> Group:
        layer, _, kind = key.rpartition(".")
        if key in self.outside:
            return Group([key], self.outside[key].split(), 1)
        if not layer.startswith("blocks."):
            return Group([key], [f"{self.outside[layer]}.{kind}"], 0)
        _, number, path = key.split(".", 2)
        for ours, theirs in self.inside.items():
            for name in ours.split():
                if path == name or path.rpartition(".")[0] == name:
                    rest, prefix = path.removeprefix(name), f"{self.blocks}{number}."
                    return Group(
                        [f"blocks.{number}.{x}{rest}" for x in ours.split()],
                        [f"{prefix}{x}{rest}" for x in theirs.split()],
                        0 if rest else 1,  # weights of experts (experts, rows, columns) are no layer's
                        name in self.transposed and kind == "weight",
                    )
        raise KeyError(path)


GPT2_NAMES = Names(
    {"embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe", "norm": "transformer.ln_f",
     "head": "lm_head"},
    "transformer.h.",
    {"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2",
     "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"},
    ("attention.qkv", "attention.out", "mlp.0", "mlp.2"),
)  # fmt: skip
LLAMA_NAMES = Names(
    {"embedding.tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers.",
    {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
     "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention.out": "self_attn.o_proj",
     "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
     "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"},
)  # fmt: skip
_MIXER = {key: name for key, name in LLAMA_NAMES.inside.items() if not key.startswith("mlp.")}
GEMMA_NAMES = LLAMA_NAMES._replace(
    inside={
        **LLAMA_NAMES.inside, "norm1_after": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm",
        "norm2_after": "post_feedforward_layernorm",
    }
)  # fmt: skip
OLMO_NAMES = LLAMA_NAMES._replace(
    inside={
        **LLAMA_NAMES.inside, "norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm",
    }
)  # fmt: skip
PHI_NAMES = LLAMA_NAMES._replace(
    inside={
        **_MIXER, "attention.qkv": "self_attn.qkv_proj", "mlp.gate mlp.up": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    }
)  # fmt: skip
MOE_NAMES = LLAMA_NAMES._replace(
    inside={
        **_MIXER, "mlp.router": "mlp.gate", "mlp.gate mlp.up": "mlp.experts.gate_up_proj",
        "mlp.down": "mlp.experts.down_proj",
    }
)  # fmt: skip


def from_family(net: nn.Module, model: nn.Module, names: Names) -> dict[str, Tensor]:
    """Return the state dict of GPT `net` from the weights of a model of this family; BadInput if it has other ones."""
    theirs, ours, state = model.state_dict(), net.state_dict(), dict[str, Tensor]()
    left = {path for path, _ in model.named_parameters()}
    for group in names.groups(ours):
        if missing := [path for path in group.theirs if path not in theirs]:
            raise BadInput("model", type(model).__name__, f"a model with {missing[0]}")
        left -= {*group.theirs}
        value = _join([theirs[path] for path in group.theirs], group.dim)
        parts = _part(value.T if group.is_transposed else value, [ours[key] for key in group.ours], group.dim)
        state |= dict(zip(group.ours, parts, strict=True))
    if left:
        raise BadInput("model", type(model).__name__, f"a model without {min(left)}")
    return state


def to_family(net: nn.Module, model: Any, names: Names) -> None:
    """Load GPT's weights into a PreTrainedModel of this family; biases that the net does not have are zeros there."""
    state = {key: torch.zeros_like(x) if key.endswith(".bias") else x for key, x in model.state_dict().items()}
    ours = net.state_dict()
    for group in names.groups(ours):
        value = _join([ours[key] for key in group.ours], group.dim)
        parts = _part(value.T if group.is_transposed else value, [state[path] for path in group.theirs], group.dim)
        state |= dict(zip(group.theirs, parts, strict=True))
    model.load_state_dict(state)
    model.tie_weights()


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _part(value: Tensor, likes: list[Tensor], dim: int) -> list[Tensor]:
    """Part a tensor into ones of the sizes of others along a dimension."""
    return [*value.split([like.shape[dim] for like in likes], dim)] if len(likes) > 1 else [value]
