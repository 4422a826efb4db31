"""The options that embeddings add to kd.py."""

from dataclasses import dataclass
from typing import Literal

from harness.runs.options import RunOptions


@dataclass
class EmbeddingOptions(RunOptions):
    """Options of a distillation of nets that embed."""

    embed: Literal["own", "teacher"] = "own"
    """the width of a student's embeddings: its own, from which methods that compare them with the teacher's learn a
    projection that is not exported; or the teacher's, by a last linear layer that is exported: for an index that the
    teacher has filled."""
