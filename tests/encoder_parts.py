"""Tiny encoders of transformers with their tokenizers, made here; import in `with_transformers`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORDS = "what is a bird that can fly over the old stone wall near our river and sing ##s ##ing ? ."
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
TEXTS = ["what is a bird ?", "birds fly over the old stone wall near our river and sing .", "wall", "the river"]


def save_word_tokenizer(folder: Path, **options: Any) -> Any:
    """WordPiece of a few words, with BERT's special tokens and numbers of a pair's texts."""
    import tokenizers
    import transformers

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS.split()])}
    pieces = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    pieces.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **{**names, **options})
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_encoder(folder: Path, family: str = "Bert", kind: str = "Model", **options: Any) -> Any:
    """An encoder of 4 blocks, or with a classifier of one score, and its tokenizer; return it in eval mode."""
    import transformers

    takes_types = family == "Bert"
    names = ["input_ids", *["token_type_ids"] * takes_types, "attention_mask"]
    save_word_tokenizer(folder, model_input_names=names, model_max_length=48)
    sizes = {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24} if family == "DistilBert" else SIZES
    counts = {"vocab_size": 64, "max_position_embeddings": 50, "pad_token_id": 0, "num_labels": 1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **counts, **options})
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    model.save_pretrained(folder)
    return model


def as_bytes(*rows: list[str]) -> Tensor:
    """Rows of k texts as (b, k, L) uint8."""
    longest = max(len(text.encode()) for row in rows for text in row)
    return torch.tensor([[[*text.encode().ljust(longest, b"\0")] for text in row] for row in rows], dtype=torch.uint8)
