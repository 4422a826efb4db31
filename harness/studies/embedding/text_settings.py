"""Settings of runs whose nets embed texts, whatever the recipe; methods of candidates are those that `only` names."""

from collections.abc import Mapping
from typing import Any

BY_DATA: Mapping[str, Mapping[str, Any]] = {
    "Pairs": {
        "teacher": "FastText", "student": "FastText", "student.width": 32, "student.buckets": 4096,
        "optimizer": "AdamW", "optimizer.lr": 1e-4,
        "variants.ce": None, "variants.kd": None, "variants.hint": None, "variants.untrained": "Untrained",
        "variants.cosine": "EmbeddingMatch", "variants.mse": "EmbeddingMatch", "variants.mse.distance": "mse",
        "variants.kl": "SimilarityKL", "variants.rkd": "RKD",
    }
}  # fmt: skip
BY_NAME: Mapping[str, Mapping[str, Any]] = {
    "margin": {"variants.margin": "MarginMSE"},
    "score": {"variants.score": "ScoreKL"},
}
