"""GPT's settings and weights as those of families of transformers: GPT-2, Llama, Mistral, Qwen3 and Gemma 2."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.mlps import gated_width

Settings = dict[str, Any]  # options of GPT
# Not in a family's configuration, or of no use there.
FREE = ("dropout", "attention_dropout", "backend", "router_noise", "balance", "experts", "top_k", "renormalise")
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class NoFamily(BadInput):
    """No family of transformers has a GPT's options."""


class Names(NamedTuple):
    """The names of GPT's layers in a family."""

    outside: dict[str, str]
    blocks: str  # what stands before a block's number
    inside: dict[str, tuple[str, ...]]  # three layers for queries, keys and values, one after the other
    transposed: tuple[str, ...] = ()  # layers whose weight is (in, out)

    def of(self, key: str) -> tuple[list[str], bool]:
        """Return the family's names for a weight of GPT, and whether it is transposed there."""
        layer, _, kind = key.rpartition(".")
        if not layer.startswith("blocks."):
            return [f"{self.outside[layer]}.{kind}"], False
        _, number, path = layer.split(".", 2)
        paths = [f"{self.blocks}.{number}.{name}.{kind}" for name in self.inside[path]]
        return paths, path in self.transposed and kind == "weight"


GPT2_NAMES = Names(
    {"embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe", "norm": "transformer.ln_f",
     "head": "lm_head"},
    "transformer.h",
    {"norm1": ("ln_1",), "attention.qkv": ("attn.c_attn",), "attention.out": ("attn.c_proj",), "norm2": ("ln_2",),
     "mlp.0": ("mlp.c_fc",), "mlp.2": ("mlp.c_proj",)},
    ("attention.qkv", "attention.out", "mlp.0", "mlp.2"),
)  # fmt: skip
LLAMA_NAMES = Names(
    {"embedding.tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers",
    {"norm1": ("input_layernorm",), "norm2": ("post_attention_layernorm",),
     "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
     "attention.out": ("self_attn.o_proj",),
     "attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",),
     "mlp.gate": ("mlp.gate_proj",), "mlp.up": ("mlp.up_proj",), "mlp.down": ("mlp.down_proj",)},
)  # fmt: skip
GEMMA_NAMES = LLAMA_NAMES._replace(
    inside=LLAMA_NAMES.inside | {
        "norm1_after": ("post_attention_layernorm",), "norm2": ("pre_feedforward_layernorm",),
        "norm2_after": ("post_feedforward_layernorm",),
    }
)  # fmt: skip


class Family(NamedTuple):
    """How a family's configuration is read and written."""

    config: str  # name of its class
    names: Names
    read: Callable[[Any], Settings]
    write: Callable[[Settings], Settings]


def _read_gpt2(config: Any) -> Settings:
    _expect(config, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    return {
        "vocab_size": config.vocab_size, "block_size": config.n_positions, "num_layers": config.n_layer,
        "num_heads": config.n_head, "embed_dim": config.n_embd, "tie_weights": config.tie_word_embeddings,
        "norm_eps": config.layer_norm_epsilon, "hidden": config.n_inner, "dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop, "mlp": _look_up(config, "activation_function", GELUS),
    }  # fmt: skip


def _write_gpt2(settings: Settings) -> Settings:
    activation = {"gelu": "gelu", "gelu_tanh": "gelu_new"}.get(settings["mlp"], "")
    return {
        "vocab_size": settings["vocab_size"], "n_positions": settings["block_size"], "n_layer": settings["num_layers"],
        "n_head": settings["num_heads"], "n_embd": settings["embed_dim"], "n_inner": settings["hidden"],
        "activation_function": activation, "layer_norm_epsilon": settings["norm_eps"],
        "tie_word_embeddings": settings["tie_weights"], "attn_pdrop": settings["attention_dropout"],
        **dict.fromkeys(("embd_pdrop", "resid_pdrop"), settings["dropout"]),
    }  # fmt: skip


def _read_llama(config: Any) -> Settings:
    """What Llama and its descendants share."""
    bias, rope = getattr(config, "attention_bias", False), _read_rope(config)
    _expect(config, mlp_bias=(bias,), hidden_act=("silu",), use_bidirectional_attention=(None, False))
    return {
        "vocab_size": config.vocab_size, "block_size": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers, "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads, "head_dim": getattr(config, "head_dim", None),
        "embed_dim": config.hidden_size, "hidden": config.intermediate_size, "bias": bias,
        "tie_weights": config.tie_word_embeddings, "attention_dropout": config.attention_dropout,
        "position": "rotary", "norm": "rms", "norm_eps": config.rms_norm_eps, "mlp": "swiglu", **rope,
    }  # fmt: skip


def _write_llama(settings: Settings) -> Settings:
    rope = {"rope_type": "default", **(settings["rope_scaling"] or {}), "rope_theta": settings["rope_base"]}
    return {
        "vocab_size": settings["vocab_size"], "max_position_embeddings": settings["block_size"],
        "num_hidden_layers": settings["num_layers"], "num_attention_heads": settings["num_heads"],
        "num_key_value_heads": settings["num_kv_heads"], "head_dim": settings["head_dim"],
        "hidden_size": settings["embed_dim"], "intermediate_size": settings["hidden"],
        "attention_bias": settings["bias"], "mlp_bias": settings["bias"], "rope_parameters": rope,
        "tie_word_embeddings": settings["tie_weights"], "attention_dropout": settings["attention_dropout"],
        "rms_norm_eps": settings["norm_eps"],
    }  # fmt: skip


def _read_mistral(config: Any) -> Settings:
    return _read_llama(config) | {"window": config.sliding_window}


def _write_mistral(settings: Settings) -> Settings:
    return _without_bias(settings) | {"sliding_window": settings["window"]}


def _read_qwen3(config: Any) -> Settings:
    _expect(config, attention_bias=(False,))
    return _read_llama(config) | {"qk_norm": True} | _read_windows(config)


def _write_qwen3(settings: Settings) -> Settings:
    windows = _write_windows(settings)
    return _without_bias(settings) | {"use_sliding_window": settings["window"] is not None, **windows}


def _read_gemma2(config: Any) -> Settings:
    _expect(config, attention_bias=(False,))
    settings = _read_llama(_Renamed(config, hidden_act={"gelu_pytorch_tanh": "silu"}.get(config.hidden_activation, "")))
    return settings | _read_windows(config) | {
        "mlp": "geglu", "norm_place": "sandwich", "unit_offset": True, "scale_embedding": True,
        "scale": config.query_pre_attn_scalar**-0.5, "softcap": config.attn_logit_softcapping,
        "final_softcap": config.final_logit_softcapping,
    }  # fmt: skip


def _write_gemma2(settings: Settings) -> Settings:
    scalar = max(round(settings["scale"] ** -2), 1)  # an integer, of which `fit_family` sees whether it is the scale
    return _without_bias(settings) | _write_windows(settings) | {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": settings["softcap"], "final_logit_softcapping": settings["final_softcap"],
    }  # fmt: skip


FAMILIES = {
    "gpt2": Family("GPT2Config", GPT2_NAMES, _read_gpt2, _write_gpt2),
    "llama": Family("LlamaConfig", LLAMA_NAMES, _read_llama, _write_llama),
    "mistral": Family("MistralConfig", LLAMA_NAMES, _read_mistral, _write_mistral),
    "qwen3": Family("Qwen3Config", LLAMA_NAMES, _read_qwen3, _write_qwen3),
    "gemma2": Family("Gemma2Config", GEMMA_NAMES, _read_gemma2, _write_gemma2),
}


class _Renamed:
    """A configuration with some of its settings replaced."""

    def __init__(self, config: Any, **settings: Any) -> None:
        self._config = config
        vars(self).update(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _without_bias(settings: Settings) -> Settings:
    """Mistral's MLPs have no bias in any setting, and a family's default has none."""
    written = _write_llama(settings)
    return {key: value for key, value in written.items() if key not in {"attention_bias", "mlp_bias"}}


def _read_rope(config: Any) -> Settings:
    rope: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if rope is None:  # of transformers before version 5
        rope = {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    options = {key: value for key, value in rope.items() if key != "rope_theta"}
    if options.pop("partial_rotary_factor", 1.0) not in {1.0, None}:
        raise BadInput("model", type(config).__name__, "rotary positions of whole heads")
    is_plain = options.get("rope_type", options.get("type", "default")) == "default"
    return {"rope_base": float(rope["rope_theta"]), "rope_scaling": None if is_plain else options}


def _read_windows(config: Any) -> Settings:
    """Which layers attend in a window; BadInput if they are none that an n-th layer interrupts."""
    kinds = config.layer_types
    full = [number for number, kind in enumerate(kinds) if kind != "sliding_attention"]
    if len(full) == len(kinds) or config.sliding_window is None:
        return {"window": None}
    every = full[0] + 1 if full else None
    expected = [number for number in range(len(kinds)) if every and (number + 1) % every == 0]
    if full != expected or {*kinds} > {"sliding_attention", "full_attention"}:
        raise BadInput("model", kinds, "windows in all layers but every n-th")
    return {"window": config.sliding_window, "full_every": every}


def _write_windows(settings: Settings) -> Settings:
    every, count = settings["full_every"], settings["num_layers"]
    kinds = ["sliding_attention" if settings["window"] is not None else "full_attention"] * count
    for number in range(every - 1, count, every) if every else ():
        kinds[number] = "full_attention"
    return {"layer_types": kinds, "sliding_window": settings["window"]}


def _expect(config: Any, **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if (value := getattr(config, key, values[0])) not in values:
            raise BadInput(f"model.config.{key}", value, " or ".join(map(str, values)))


def _look_up(config: Any, key: str, table: Mapping[str, str]) -> str:
    if (value := getattr(config, key)) not in table:
        raise BadInput(f"model.config.{key}", value, f"one of {', '.join(table)}")
    return table[value]


def family_of(config: Any) -> Family:
    """Return the family of a configuration; BadInput for an unknown one."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise BadInput("model", kind, f"a model of a family that GPT knows: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def complete(settings: Settings, defaults: Settings) -> Settings:
    """Return all of GPT's options by the values that its null ones stand for."""
    full = {**defaults, **settings}
    width, heads = full["embed_dim"], full["num_heads"]
    full["num_kv_heads"] = full["num_kv_heads"] or heads
    full["head_dim"] = full["head_dim"] or width // heads
    full["scale"] = full["scale"] or full["head_dim"] ** -0.5
    full["hidden"] = full["hidden"] or (4 * width if full["mlp"] in {"gelu", "gelu_tanh"} else gated_width(width))
    if full["full_every"] is not None and full["full_every"] > full["num_layers"]:
        full["full_every"] = None
    return full


def fit_family(settings: Settings, defaults: Settings, transformers: Any) -> tuple[str, Any]:
    """Return the name of the family that computes what GPT does with these settings, and its configuration.

    Raises:
        NoFamily: none does; the message names what differs from the nearest one.
    """
    full = complete(settings, defaults)
    nearest: tuple[str, list[str]] | None = None
    for name, family in FAMILIES.items():
        try:
            config = getattr(transformers, family.config)(**family.write(full), bos_token_id=None, eos_token_id=None)
            again = complete(family.read(config), defaults)
        except Exception:  # noqa: BLE001 - a configuration that can't have such values says so in its own way
            continue
        ignored = {*FREE, "bias"} if name == "gpt2" else {*FREE}  # biases that the net does not have are zeros there
        if name == "mistral" and full["window"] is None:
            continue  # it is a Llama
        differing = [key for key in full if key not in ignored and again[key] != full[key]]
        if not differing:
            return name, config
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = name, differing
    assert nearest is not None
    differing = nearest[1]
    expected = f"that of a family of transformers ({', '.join(FAMILIES)}); the nearest, {nearest[0]}, differs in "
    raise NoFamily(differing[0], full[differing[0]], expected + ", ".join(differing))


def from_family(net: nn.Module, model: nn.Module, names: Names) -> dict[str, Tensor]:
    """Return the state dict of GPT `net` from the weights of a model of this family; BadInput if it has other ones."""
    theirs, state = model.state_dict(), {}
    left = {path for path, _ in model.named_parameters()}
    for key in net.state_dict():
        paths, is_transposed = names.of(key)
        if missing := [path for path in paths if path not in theirs]:
            raise BadInput("model", type(model).__name__, f"a model with {missing[0]}")
        left -= {*paths}
        value = torch.cat([theirs[path] for path in paths]) if len(paths) > 1 else theirs[paths[0]]
        state[key] = value.T if is_transposed else value
    if left:
        raise BadInput("model", type(model).__name__, f"a model without {min(left)}")
    return state


def to_family(net: nn.Module, model: Any, names: Names) -> None:
    """Load GPT's weights into a PreTrainedModel of this family; biases that the net does not have are zeros there."""
    state = {key: torch.zeros_like(x) if key.endswith(".bias") else x for key, x in model.state_dict().items()}
    for key, value in net.state_dict().items():
        paths, is_transposed = names.of(key)
        parts: Iterable[Tensor] = value.split([len(state[path]) for path in paths]) if len(paths) > 1 else [value]
        state |= {path: part.T if is_transposed else part for path, part in zip(paths, parts, strict=True)}
    model.load_state_dict(state)
    model.tie_weights()
