"""Language models as models of transformers: what nets of transformers hold, and `GPT` as one of its family."""

import copy
from contextlib import suppress
from typing import Any

from torch import nn

from lit_modules.nets.adapters import merge_adapters
from lit_modules.nets.families import NoFamily
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.hugging_face_seq2seq import HuggingFaceSeq2Seq
from lit_modules.nets.transformers_models import import_transformers


def as_transformers(net: nn.Module) -> Any | None:
    """Return a trained net as a model of transformers with the same logits, in eval mode; None if it is none.

    Adapters are merged into its weights, which changes logits by their rounding. It has the net's V tokens.

    Raises:
        Missing: transformers is not installed.
    """
    if isinstance(net, HuggingFaceLM | HuggingFaceSeq2Seq):
        model: Any = copy.deepcopy(net.model).eval()
        merge_adapters(model)
        if model.config.vocab_size != net.vocab_size:  # it was padded, or its texts have other tokens
            model.resize_token_embeddings(net.vocab_size)
        return model
    if isinstance(net, GPT):
        with suppress(NoFamily):
            return net.as_transformers()
    return None


def set_tokenizer(model: Any, tokenizer: Any, name: str | None) -> None:
    """Let a model of transformers write with a tokenizer, by the settings of the model `name` if that has the same."""
    with import_transformers(name or type(model).__name__, "settings of generation") as transformers:
        model.generation_config = transformers.GenerationConfig()
        if name is not None:
            with suppress(OSError):  # it has none
                model.generation_config = transformers.GenerationConfig.from_pretrained(name)
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
