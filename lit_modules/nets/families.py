"""GPT's settings as those of families of transformers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from apprentice.errors import BadInput
from lit_modules.nets.family_weights import (
    GEMMA_NAMES,
    GPT2_NAMES,
    LLAMA_NAMES,
    MOE_NAMES,
    OLMO_NAMES,
    PHI_NAMES,
    Names,
)
from lit_modules.nets.mlps import gated_width

Settings = dict[str, Any]  # options of GPT
# Not in a family's configuration, or of no use there.
FREE = ("dropout", "attention_dropout", "backend", "router_noise", "balance")
BIASES = ("bias", "qkv_bias")
EXPERTS = ("experts", "top_k", "renormalise")  # of no use without
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class NoFamily(BadInput):
    """No family of transformers has a GPT's options."""


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
    if rope["rope_fraction"] != 1 and config.model_type != "phi3":  # others turn whole heads, whatever it says
        raise BadInput("model.config.rope_parameters.partial_rotary_factor", rope["rope_fraction"], "1")
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


def _without_bias(settings: Settings) -> Settings:
    """Mistral's MLPs have no bias in any setting, and a family's default has none."""
    written = _write_llama(settings)
    return {key: value for key, value in written.items() if key not in {"attention_bias", "mlp_bias"}}


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


def _read_qwen2(config: Any) -> Settings:
    return _read_llama(config) | {"qkv_bias": True} | _read_windows(config)


def _read_phi3(config: Any) -> Settings:
    _expect(config, resid_pdrop=(0.0,), embd_pdrop=(0.0,))
    return _read_llama(config) | {"window": config.sliding_window}


def _write_phi3(settings: Settings) -> Settings:
    written = _write_mistral(settings)
    written["rope_parameters"]["partial_rotary_factor"] = settings["rope_fraction"]
    return {**written, "pad_token_id": None, "original_max_position_embeddings": settings["block_size"]}


def _read_smollm3(config: Any) -> Settings:
    without = [number for number, turns in enumerate(config.no_rope_layers) if not turns]
    every = _every(without, config.num_hidden_layers, "no_rope_layers", config.no_rope_layers)
    return _read_llama(config) | _read_windows(config) | {"nope_every": every}


def _write_smollm3(settings: Settings) -> Settings:
    windows, every = _write_windows(settings), settings["nope_every"]
    turns = [int(not every or (number + 1) % every != 0) for number in range(settings["num_layers"])]
    used = {"use_sliding_window": settings["window"] is not None, "no_rope_layers": turns, "pad_token_id": None}
    used |= {"no_rope_layer_interval": every} if every else {}
    return _write_llama(settings) | used | windows


def _read_mixtral(config: Any) -> Settings:
    return _read_llama(config) | {
        "window": config.sliding_window, "mlp": "moe", "experts": config.num_local_experts,
        "top_k": config.num_experts_per_tok, "balance": config.router_aux_loss_coef,
        "router_noise": config.router_jitter_noise,
    }  # fmt: skip


def _write_mixtral(settings: Settings) -> Settings:
    return _write_mistral(settings) | {
        "num_local_experts": settings["experts"], "num_experts_per_tok": settings["top_k"],
        "router_aux_loss_coef": settings["balance"], "router_jitter_noise": settings["router_noise"],
    }  # fmt: skip


def _read_qwen3_moe(config: Any) -> Settings:
    _expect(config, attention_bias=(False,), decoder_sparse_step=(1,), mlp_only_layers=([],))
    settings = _read_llama(_Renamed(config, intermediate_size=config.moe_intermediate_size))
    return settings | {
        "qk_norm": True, "window": config.sliding_window if config.use_sliding_window else None, "mlp": "moe",
        "experts": config.num_experts, "top_k": config.num_experts_per_tok, "renormalise": config.norm_topk_prob,
        "balance": config.router_aux_loss_coef,
    }  # fmt: skip


def _write_qwen3_moe(settings: Settings) -> Settings:
    return _write_mistral(settings) | {
        "use_sliding_window": settings["window"] is not None, "moe_intermediate_size": settings["hidden"],
        "num_experts": settings["experts"], "num_experts_per_tok": settings["top_k"],
        "norm_topk_prob": settings["renormalise"], "router_aux_loss_coef": settings["balance"],
    }  # fmt: skip


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


def _read_gemma3(config: Any) -> Settings:
    _expect(config, attn_logit_softcapping=(None,))  # which transformers does not apply
    ropes = config.rope_parameters
    settings = _read_gemma2(_Renamed(config, rope_parameters=ropes["full_attention"])) | {"qk_norm": True}
    local = _read_rope(_Renamed(config, rope_parameters=ropes["sliding_attention"]))
    if settings["window"] is None or local.items() <= settings.items():
        return settings
    if local["rope_scaling"] is not None or local["rope_fraction"] != 1:
        raise BadInput("model.config.rope_parameters.sliding_attention", ropes["sliding_attention"], "rope_theta alone")
    return settings | {"local_rope_base": local["rope_base"]}


def _write_gemma3(settings: Settings) -> Settings:
    written, local = _write_gemma2(settings), settings["local_rope_base"]
    rope = written["rope_parameters"]
    ropes = {"full_attention": rope, "sliding_attention": {**rope} if local is None else {"rope_theta": local}}
    return written | {"rope_parameters": ropes, "attn_logit_softcapping": None}


def _read_olmo2(config: Any) -> Settings:
    _expect(config, attention_bias=(False,))
    return _read_llama(config) | {"norm_place": "after", "qk_norm": "width"}


FAMILIES = {
    "gpt2": Family("GPT2Config", GPT2_NAMES, _read_gpt2, _write_gpt2),
    "llama": Family("LlamaConfig", LLAMA_NAMES, _read_llama, _write_llama),
    "mistral": Family("MistralConfig", LLAMA_NAMES, _read_mistral, _write_mistral),
    "qwen3": Family("Qwen3Config", LLAMA_NAMES, _read_qwen3, _write_qwen3),
    "gemma2": Family("Gemma2Config", GEMMA_NAMES, _read_gemma2, _write_gemma2),
    "gemma3_text": Family("Gemma3TextConfig", GEMMA_NAMES, _read_gemma3, _write_gemma3),
    "olmo2": Family("Olmo2Config", OLMO_NAMES, _read_olmo2, _without_bias),
    "qwen2": Family("Qwen2Config", LLAMA_NAMES, _read_qwen2, _write_qwen3),
    "phi3": Family("Phi3Config", PHI_NAMES, _read_phi3, _write_phi3),
    "smollm3": Family("SmolLM3Config", LLAMA_NAMES, _read_smollm3, _write_smollm3),
    "mixtral": Family("MixtralConfig", MOE_NAMES, _read_mixtral, _write_mixtral),
    "qwen3_moe": Family("Qwen3MoeConfig", MOE_NAMES, _read_qwen3_moe, _write_qwen3_moe),
}


class _Renamed:
    """A configuration with some of its settings replaced."""

    def __init__(self, config: Any, **settings: Any) -> None:
        self._config = config
        vars(self).update(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _read_rope(config: Any) -> Settings:
    rope: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if rope is None:  # of transformers before version 5
        rope = {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    options = {key: value for key, value in rope.items() if key != "rope_theta"}
    fraction = options.pop("partial_rotary_factor", None) or getattr(config, "partial_rotary_factor", None) or 1.0
    is_plain = options.get("rope_type", options.get("type", "default")) == "default"
    scaling = None if is_plain else options
    return {"rope_base": float(rope["rope_theta"]), "rope_scaling": scaling, "rope_fraction": float(fraction)}


def _read_windows(config: Any) -> Settings:
    """Which layers attend in a window; BadInput if they are none that an n-th layer interrupts."""
    kinds = config.layer_types
    full = [number for number, kind in enumerate(kinds) if kind != "sliding_attention"]
    if len(full) == len(kinds) or config.sliding_window is None:
        return {"window": None}
    if {*kinds} > {"sliding_attention", "full_attention"}:
        raise BadInput("model.config.layer_types", kinds, "sliding_attention and full_attention alone")
    return {"window": config.sliding_window, "full_every": _every(full, len(kinds), "layer_types", kinds)}


def _every(numbers: list[int], count: int, key: str, value: object) -> int | None:
    """Return n if these layers of so many are every n-th; None if there are none; else BadInput."""
    every = numbers[0] + 1 if numbers else None
    if numbers != [number for number in range(count) if every and (number + 1) % every == 0]:
        raise BadInput(f"model.config.{key}", value, "layers of one kind but every n-th")
    return every


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
    full["qkv_bias"] = full["bias"] if full["qkv_bias"] is None else full["qkv_bias"]
    if full["local_rope_base"] == full["rope_base"] and full["rope_scaling"] is None:
        full["local_rope_base"] = None
    for every in ("full_every", "nope_every"):
        if full[every] is not None and full[every] > full["num_layers"]:
            full[every] = None
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
        # Biases that the net does not have are zeros there.
        ignored = {*FREE, *(() if full["mlp"] == "moe" else EXPERTS), *(BIASES if name == "gpt2" else ())}
        differing = [key for key in full if key not in ignored and again[key] != full[key]]
        if not differing:
            return name, config
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = name, differing
    assert nearest is not None
    differing = nearest[1]
    expected = f"that of a family of transformers ({', '.join(FAMILIES)}); the nearest, {nearest[0]}, differs in "
    raise NoFamily(differing[0], full[differing[0]], expected + ", ".join(differing))
