"""What users need to know of a net for 8 x 8 digits."""

from typing import Any

from datamodules.preparation import Preparation
from harness.runs.facts import NetFacts
from tests.training import SHAPE


def facts(**changes: Any) -> NetFacts:
    inputs = Preparation(kind="images", shape=SHAPE, mean=(0.3,), std=(0.4,))
    known: dict[str, Any] = {"classes": tuple("0123456789"), "versions": {"torch": "2"}, "commit": "abc"}
    return NetFacts(**{"task": "classification", "inputs": inputs, **known, **changes})
