"""Settings of runs whose students begin with a pretrained language model's weights, where none are chosen."""

from collections.abc import Mapping
from typing import Any

from harness.studies.recipes import DEFAULT_OF_TEXTS

# The rate: halves of SmolLM2 learn slower at 1e-4 and no better at 1e-3, at which the whole model forgets within three
# steps: docs/measurements/language-models.md. A warm-up, as AdamW's moments are of few steps at first.
SETTINGS: Mapping[str, Any] = {
    "optimizer": "AdamW", "optimizer.lr": 3e-4, "scheduler": "CosineWarmup", "scheduler.warmup_ratio": 0.1,
    "trainer.gradient_clip_val": 1.0,
}  # fmt: skip
MODELS, OF_TEACHER = {"HuggingFaceLM", "HuggingFaceSeq2Seq"}, {"Pruned", "Mixer"}  # classes


def of_pretrained(flags: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """Return what any `data` set beside flags of a run; nothing beside an optimizer, a schedule or a recipe.

    The rate of the recipe of texts is of new nets.
    """
    chosen = {name: flags.get(name) for name in ("optimizer", "scheduler", "recipe")}
    if {*chosen.values()} - {None, "null", DEFAULT_OF_TEXTS}:
        return {}
    keys = ["student", *(flag for flag in flags if flag.startswith("students.") and flag.count(".") == 1)]
    begins = _is_pretrained(flags, "teacher")
    return {...: SETTINGS} if any(_begins_pretrained(flags, key, begins) for key in keys) else {}


def _begins_pretrained(flags: Mapping[str, Any], key: str, teacher: bool) -> bool:
    return _is_pretrained(flags, key) or (teacher and _class_name(flags, key) in OF_TEACHER)


def _is_pretrained(flags: Mapping[str, Any], key: str) -> bool:
    return _class_name(flags, key) in MODELS and str(flags.get(f"{key}.pretrained")).lower() == "true"


def _class_name(flags: Mapping[str, Any], key: str) -> str:
    return str(flags.get(key)).rpartition(".")[2]
