"""The experiment's own options."""

from dataclasses import dataclass
from typing import ClassVar

from apprentice.errors import BadInput
from harness import config


@dataclass
class Options(config.OneSeedOptions):
    """Options of quantising a student.

    Args:
        exact: none; int8 is another net than the one that was trained.
        run: a student's folder, as RUN/seed0/kd; when not given, one is trained.
        teacher: its teacher's folder, for an objective that asks it; RUN/seed0/teacher if that is there.
        student_epochs: of a student that is trained here, by Adam with a learning rate of 0.001.
        freeze_epoch: from this epoch on, counted from 0, ranges and BatchNorm's statistics stay as they are.
        evaluate_every: epochs from one int8 validation to the next.
        calibration_size: training samples that post-training quantisation takes its ranges from.
    """

    run: str | None = None
    teacher: str | None = None
    student_epochs: int = 10
    freeze_epoch: int = 2
    evaluate_every: int = 1
    calibration_size: int = 512
    why_one: ClassVar[str] = "one student is deployed"
    why_inexact: ClassVar[str] = "ranges are the global batch's, not a shard's"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student_epochs", "freeze_epoch", "evaluate_every", "calibration_size"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), "a whole number, at least 1")
        if self.run is not None and self.student_epochs != Options.student_epochs:
            raise BadInput(
                "student_epochs", self.student_epochs, "it left out: the student in --run is trained already"
            )
