"""Small language models for tests, and a text for them."""

from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

from apprentice.keyed import with_seed
from datamodules import Text
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import GPT
from lit_modules.text.on_policy import OnPolicyTexts

OF_TEXTS = {
    "AttentionScores",
    "HiddenStates",
    "Linearize",
    "MiniLM",
    "SequenceLevel",
    "ULD",
}  # methods that read tokens of texts; some take ViTs, too
OF_VITS = {"AttnDistill"}  # of images, by ViTs alone
SMALL: dict[str, Any] = {"num_layers": 3, "num_heads": 2, "embed_dim": 12}


def written(folder: Path, characters: int = 500) -> Path:
    """A file of English."""
    path = folder / "text"
    path.write_text(" ".join(topics["import"].split())[:characters])
    assert len(path.read_text()) == characters
    return path


def text(folder: Path, **options: Any) -> Text:
    """450 characters train, 49 validate, 56 test: an epoch has 55 blocks in batches of 13, the last of 3."""
    data = Text(written(folder, 555), **{"block_size": 8, "batch_size": 13, "validation_size": 49} | options)
    data.setup()
    return data


PACKED = SimpleNamespace(packs_samples=True, train_texts_repeat=True)  # of a data module: rows of several texts


def on_policy(module: Distillation) -> OnPolicyTexts:
    """What its students write."""
    return next(extra for extra in module.extras if isinstance(extra, OnPolicyTexts))


def gpt(vocab_size: int = 11, block_size: int = 16, seed: int = 0, **options: Any) -> GPT:
    return with_seed(seed, lambda: GPT(vocab_size, block_size, **SMALL | options))


def language_model(data: Text, **options: Any) -> LitLanguageModel:
    """A model of this text; what is not the net's in `options` is the module's."""
    names = ("lr", "warmup_steps", "clip_norm", "compiled", "seed")
    of_module = {name: options.pop(name) for name in names if name in options}
    return LitLanguageModel(gpt(**data.net_arguments, **options), **{"warmup_steps": 5} | of_module)
