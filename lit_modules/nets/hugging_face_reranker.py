"""Cross-encoders of transformers: a query and a candidate are read together (Nogueira and Cho 2019, 1901.04085)."""

import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from apprentice.errors import BadInput
from apprentice.keyed import slice_rows
from lit_modules.nets.base import Net
from lit_modules.nets.hugging_face_text import build_model
from lit_modules.nets.text_tokens import TextTokenizer, decode_texts
from lit_modules.nets.transformers_models import find_block_paths

HEADS = "classifier.", "pooler.", "score.", "pre_classifier.", "head."  # of families, by the start of their names


class HuggingFaceReranker(Net):
    """A cross-encoder of transformers: scores of the other texts of a row for its first, which is the query.

    Scores are logits, as those of `CrossEncoder.predict` of sentence-transformers without its activation.

    Args:
        name: a model of the hub, or a folder that `save_pretrained` or sentence-transformers wrote; its configuration
            and tokenizer are read again to rebuild the net.
        pretrained: start with its weights, not with new ones.
        new_head: with the weights of an encoder alone, start with a new classifier, which has to learn.
        max_length: tokens of a query and a candidate together at most.
        config: changes to its configuration, as {"num_hidden_layers": 2}: a smaller model of the same family, with new
            weights.
        dropout: probability of a zero in hidden states; keyed by the row, so that students don't disturb one another.

    Raises:
        Missing: transformers is not installed.
        BadInput: no such model, or one without its encoder's weights, or with several classes.
    """

    untrained = MappingProxyType({"pretrained": False})
    trained_if = "pretrained"
    embeds = True  # nothing of it is left out
    ranks = True

    def __init__(
        self, name: str, pretrained: bool = False, new_head: bool = False,
        max_length: int | None = None, config: dict[str, Any] | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.model: Any = build_model(
            "AutoModelForSequenceClassification",
            name,
            pretrained,
            config,
            dropout,
            HEADS if new_head else (),
            num_labels=1,
        )
        self.tokens = TextTokenizer(name, max_length, getattr(self.model.config, "max_position_embeddings", None))
        self.stages = find_block_paths(self.model)
        self.feature_layer = self.stages[-1] if self.stages else ""

    def forward(self, texts: Tensor) -> Tensor:
        """Scores (b, k - 1) of texts (b, k, L), bytes that zeros fill up; BadInput if a row has one text."""
        if texts.dim() != 3 or texts.shape[1] < 2:
            raise BadInput("name", self.name, f"rows of two texts or more, (b, k, L); they are {tuple(texts.shape)}")
        rows, candidates = len(texts), texts.shape[1] - 1
        whole = decode_texts(texts.flatten(0, 1))
        pairs = [
            (whole[start], whole[start + place])
            for start in range(0, len(whole), candidates + 1)
            for place in range(1, candidates + 1)
        ]
        with slice_rows(0, None, candidates)():
            scores: Tensor = self.model(**self.tokens(pairs, texts.device)).logits
        return scores.view(rows, candidates)

    def save(self, folder: Path) -> None:
        """Write a folder that `CrossEncoder` loads."""
        model: Any = copy.deepcopy(self.model).float()
        model.save_pretrained(folder)
        self.tokens.tokenizer.model_max_length = self.tokens.max_length
        self.tokens.tokenizer.save_pretrained(folder)
