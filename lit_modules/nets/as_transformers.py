"""Language models as models of transformers: what `HuggingFaceLM` holds, and `GPT` as the GPT-2 that it is."""

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.gguf import model_folder
from lit_modules.nets.adapters import merge_adapters
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM, import_transformers

# Names of GPT's layers in GPT2LMHeadModel; `True` where its weight is transposed.
OUTSIDE = {"embedding.tokens": "wte", "embedding.positions": "wpe", "norm": "ln_f"}
IN_BLOCKS = {
    "norm1": ("ln_1", False), "attention.qkv": ("attn.c_attn", True), "attention.out": ("attn.c_proj", True),
    "norm2": ("ln_2", False), "mlp.0": ("mlp.c_fc", True), "mlp.2": ("mlp.c_proj", True),
}  # fmt: skip


def as_transformers(net: nn.Module) -> Any | None:
    """Return a trained net as a model of transformers with the same logits, in eval mode; None if it is none.

    Adapters are merged into its weights, which changes logits by their rounding. It has the net's V tokens.

    Raises:
        Missing: transformers is not installed.
    """
    if isinstance(net, HuggingFaceLM):
        model: Any = copy.deepcopy(net.model).eval()
        merge_adapters(model)
        if model.config.vocab_size != net.vocab_size:  # it was padded, or its texts have other tokens
            model.resize_token_embeddings(net.vocab_size)
        return model
    if isinstance(net, GPT):
        return _gpt2(net)
    return None


def set_tokenizer(model: Any, tokenizer: Any, name: str | None) -> None:
    """Let a model of transformers write with a tokenizer, by the settings of the model `name` if that has the same."""
    with import_transformers(name or type(model).__name__, "settings of generation") as transformers:
        model.generation_config = transformers.GenerationConfig()
        if name is not None:
            with suppress(OSError):  # it has none
                model.generation_config = transformers.GenerationConfig.from_pretrained(model_folder(name))
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # it could not be saved: older files set a temperature alone
            model.generation_config.do_sample = True
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, key)
        if name is None:
            setattr(model.config, key, token)
        if getattr(model.generation_config, key) is None:
            setattr(model.generation_config, key, token)


def _gpt2(net: GPT) -> Any:
    """Biases that the net does not have are zeros there."""
    weight = net.embedding.tokens.weight
    first: Any = net.blocks[0]
    with import_transformers(type(net).__name__, "a GPT-2") as transformers:
        config = transformers.GPT2Config(
            vocab_size=weight.shape[0], n_positions=net.block_size, n_embd=weight.shape[1], n_layer=len(net.blocks),
            n_head=first.attention.num_heads, activation_function="gelu", layer_norm_epsilon=net.norm.eps,
            tie_word_embeddings=net.tie_weights, bos_token_id=None, eos_token_id=None,
            **dict.fromkeys(("embd_pdrop", "resid_pdrop"), first.dropout1.p), attn_pdrop=first.attention.dropout,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=weight.dtype)
    state = {key: torch.zeros_like(x) if key.endswith(".bias") else x for key, x in model.state_dict().items()}
    for key, x in net.state_dict().items():
        name, value = _rename(key, x)
        state[name] = value
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


def _rename(key: str, x: Tensor) -> tuple[str, Tensor]:
    layer, _, kind = key.rpartition(".")
    if layer == "head":
        return f"lm_head.{kind}", x
    if layer in OUTSIDE:
        return f"transformer.{OUTSIDE[layer]}.{kind}", x
    _, number, path = layer.split(".", 2)
    name, is_transposed = IN_BLOCKS[path]
    return f"transformer.h.{number}.{name}.{kind}", x.T if is_transposed and kind == "weight" else x
