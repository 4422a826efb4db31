"""The experiment's own options."""

from dataclasses import dataclass

from apprentice import cli
from apprentice.errors import BadInput


@dataclass
class Options(cli.RunOptions):
    """Options of quantising a student.

    Args:
        seeds: the one seed, as [42].
        exact: none; int8 is another net than the one that was trained.
        run: a student's folder, as RUN/seed0/kd; when not given, one is trained.
        teacher: its teacher's folder, for an objective that asks it; RUN/seed0/teacher if that is there.
        student_epochs: of a student that is trained here, by Adam with a learning rate of 0.001.
        freeze_epoch: from this epoch on, counted from 0, ranges and BatchNorm's statistics stay as they are.
        evaluate_every: epochs from one int8 validation to the next.
        calibration_size: training samples that post-training quantisation takes its ranges from.
    """

    seeds: int | list[int] = 1
    exact: int | None = None
    run: str | None = None
    teacher: str | None = None
    student_epochs: int = 10
    freeze_epoch: int = 2
    evaluate_every: int = 1
    calibration_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seeds, list) and len(self.seeds) > 1:
            raise BadInput("seeds", self.seeds, "one seed, as [42]: one student is deployed")
        if self.exact is not None:
            raise BadInput("exact", self.exact, "it left out: ranges are the global batch's, not a shard's")
        for name in ("student_epochs", "freeze_epoch", "evaluate_every", "calibration_size"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), "a whole number, at least 1")
