"""Encoders of transformers that embed texts, as sentence-transformers uses them (Reimers and Gurevych 2019)."""

import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import Dropout, slice_rows
from lit_modules.nets.base import Net
from lit_modules.nets.sentence_folder import Pool, SentenceSettings, read_settings, write_settings
from lit_modules.nets.text_tokens import TextTokenizer, decode_texts
from lit_modules.nets.transformers_models import SAFE, change_config, find_block_paths, import_transformers, load_model


class HuggingFaceText(Net):
    """An encoder of transformers that embeds texts, which it reads as bytes and cuts into its own tokens.

    Equal to `SentenceTransformer.encode` of the same folder. Where an option is left out, a folder of
    sentence-transformers says it; of another one the mean of all tokens is taken as it is. Attention has no dropout.

    Attributes:
        width: D, values of an embedding.

    Args:
        name: a model of the hub, or a folder that `save_pretrained` or sentence-transformers wrote; its configuration
            and tokenizer are read again to rebuild the net.
        pretrained: start with its weights, not with new ones.
        pool: how the tokens' states become one: their `mean`, that of the first one (`cls`), their `max`, or that of
            the `last` one.
        normalize: divide embeddings by their length.
        max_length: tokens of a text at most.
        query_prompt: what comes before the first text of a row, as "query: " (E5); default: the folder's prompt.
        document_prompt: what comes before its other texts, and before texts without a row.
        config: changes to its configuration, as {"num_hidden_layers": 2}: a smaller model of the same family, with new
            weights. `Pruned` keeps the teacher's weights.
        dropout: probability of a zero in hidden states; keyed by the row, so that students don't disturb one another.

    Raises:
        Missing: transformers is not installed.
        BadInput: no such model, or one without all its weights, or a folder with other modules.
    """

    untrained = MappingProxyType({"pretrained": False})
    trained_if = "pretrained"
    embeds = True

    def __init__(
        self, name: str, pretrained: bool = False, pool: Pool | None = None, normalize: bool | None = None,
        max_length: int | None = None, query_prompt: str | None = None, document_prompt: str | None = None,
        config: dict[str, Any] | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Any
        if pool is not None and pool not in get_args(Pool):
            raise BadInput("pool", pool, " or ".join(get_args(Pool)))
        self.name = name
        self.model = build_model("AutoModel", name, pretrained, config, dropout, ("pooler.",))
        if (pooler := getattr(self.model, "pooler", None)) is not None:
            pooler.requires_grad_(False)  # of no use here
        says = read_settings(name).replaced_by(
            pool=pool, normalize=normalize, max_length=max_length, query_prompt=query_prompt,
            document_prompt=document_prompt,
        )  # fmt: skip
        self.tokens = TextTokenizer(name, says.max_length, getattr(self.model.config, "max_position_embeddings", None))
        self.settings = says._replace(
            pool=says.pool or "mean", normalize=bool(says.normalize), max_length=self.tokens.max_length
        )
        self.stages = find_block_paths(self.model)
        self.feature_layer = self.stages[-1] if self.stages else ""
        self.width: int = self.model.config.hidden_size

    def forward(self, texts: Tensor) -> Tensor:
        """Embeddings (b, k, D) of k texts a row, bytes (b, k, L) that zeros fill up; or (n, D) of texts (n, L)."""
        places = texts.shape[:-1]
        inputs = self.tokens(self._with_prompts(texts), texts.device)
        with slice_rows(0, None, places[1:].numel())():
            states = self.model(**inputs).last_hidden_state
        embeddings = pool_states(states, inputs["attention_mask"], self.settings)
        return embeddings.view(*places, self.width)

    def _with_prompts(self, texts: Tensor) -> list[str]:
        whole = decode_texts(texts.flatten(0, -2))
        of_query, of_document = self.settings.query_prompt or "", self.settings.document_prompt or ""
        count = texts.shape[-2] if texts.dim() > 2 else 0
        whole = [(of_query if count and i % count == 0 else of_document) + text for i, text in enumerate(whole)]
        return [text.lower() for text in whole] if self.settings.lower else whole

    def save(self, folder: Path, last: nn.Linear | None = None) -> None:
        """Write a folder that `SentenceTransformer` loads, whose vectors are these, or what a `last` layer gives."""
        model: Any = copy.deepcopy(self.model).float()
        model.save_pretrained(folder)
        self.tokens.tokenizer.save_pretrained(folder)
        write_settings(folder, self.settings, self.width, last)


def pool_states(states: Tensor, mask: Tensor, settings: SentenceSettings) -> Tensor:
    """Return embeddings (n, D) of states (n, T, D) of tokens that a mask (n, T) counts, the first ones of each row."""
    counts = mask[:, :, None].to(states.dtype)
    if settings.pool == "mean":
        pooled = (states * counts).sum(1) / counts.sum(1)
    elif settings.pool == "max":
        pooled = states.masked_fill(counts == 0, -torch.inf).amax(1)
    else:
        last = mask.sum(1) - 1 if settings.pool == "last" else torch.zeros_like(mask[:, 0])
        pooled = states[torch.arange(len(states), device=states.device), last]
    return F.normalize(pooled, dim=1) if settings.normalize else pooled


def build_model(
    kind: str, name: str, pretrained: bool, changes: dict[str, Any] | None, dropout: float, new: tuple[str, ...],
    **options: Any,
) -> Any:  # fmt: skip
    """Build an encoder of transformers by the name of its class, in training mode, with keyed dropout alone.

    Weights whose names begin as in `new` may be missing, and are new then; `options` are its configuration's.

    Raises:
        BadInput: there is no such model, or it lacks weights.
    """
    if changes and pretrained:
        raise BadInput("config", changes, "not allowed with pretrained weights; Pruned keeps a part of a teacher's")
    if not 0 <= dropout < 1:
        raise BadInput("dropout", dropout, "at least 0, less than 1")
    with import_transformers(name, "an encoder of texts") as transformers:
        config = transformers.AutoConfig.from_pretrained(name, **SAFE, **options)
        change_config(config, changes or {})
        rates, model_class = set_dropout(config, dropout), getattr(transformers, kind)
        if pretrained:
            model, missing = load_model(model_class, name, config=config)
        else:
            model, missing = model_class.from_config(config, dtype=torch.float32), []
    if lacks := [key for key in missing if not key.startswith(new)]:
        raise BadInput("name", name, f"a model with all its weights; it has no {lacks[0]}")
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Dropout):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, Dropout(layer.p))
    vars(model.config).update(rates)  # for those who train it elsewhere
    return model.train()


def set_dropout(config: Any, rate: float) -> dict[str, float]:
    """Set the rates of dropout in a configuration, and none in attention, whose masks would be of pairs of tokens.

    Return those that it had.
    """
    rates = {name: value for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    for name in rates:
        setattr(config, name, 0.0 if "att" in name else rate)
    return rates
