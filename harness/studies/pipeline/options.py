"""The study's own options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from apprentice.errors import BadInput
from harness import config

QUICK = {"batch_size": 8, "image_size": 32, "num_classes": 10, "split_sizes": [2, 4], "repeats": 2, "batches": 1}
TUTORIALS_CUT = "model.layer2"


@dataclass
class Options(config.OneSeedOptions):
    """Options of the study; sizes are the tutorial's.

    Args:
        exact: none; each row has other micro-batches, and no weights are compared.
        batch_size: images of a step.
        image_size: their height and width.
        num_classes: outputs of the net.
        split_sizes: images of a micro-batch.
        repeats: how often each row is timed.
        batches: steps that are timed together.
        cut_after: path of the layer after which the net is cut in two, beside the cut of --trainer.strategy.balance.
        quick: take small sizes wherever none are given.
    """

    batch_size: int = 120
    image_size: int = 128
    num_classes: int = 1000
    split_sizes: list[int] = field(default_factory=lambda: [1, 3, 5, 8, 10, 12, 20, 40, 60])
    repeats: int = 10
    batches: int = 3
    cut_after: str | None = TUTORIALS_CUT
    quick: bool = False
    quick_values: ClassVar[Mapping[str, Any]] = QUICK
    why_inexact: ClassVar[str] = "each row has other micro-batches"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "image_size", "num_classes", "repeats", "batches"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), "at least 1")
        sizes = self.split_sizes
        if not sizes or len(set(sizes)) < len(sizes) or not all(1 <= size < self.batch_size for size in sizes):
            raise BadInput("split_sizes", sizes, f"numbers from 1 to {self.batch_size - 1}, none of them twice")
