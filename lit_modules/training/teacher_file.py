"""The outputs of a teacher that is in a file: what stands in the place of a store of a live teacher's."""

from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_modules.nets.stored import TeacherInFile
from lit_modules.objectives.base import condense_teacher
from lit_modules.training.teacher import KeptOutputs, Teacher, layers_read


class TeacherFile(KeptOutputs):
    """The outputs for all training samples, as objectives read them, on a rank's device.

    Args:
        teacher: one that has found those of the data.
    """

    folder = None

    def __init__(self, teacher: TeacherInFile) -> None:
        super().__init__()
        self.teacher = teacher

    def is_wanted(self, data: Any, epochs: float) -> bool:
        """Whether the teacher runs otherwise: this one never does."""
        return True

    def fill(self, data: Any, teacher: Teacher, trainer: Trainer) -> int:
        """Take them from the teacher; none are computed."""
        places = torch.arange(data.sizes["train"], device=trainer.strategy.root_device)
        outputs = self.teacher.rows("train", places, layers_read(self.teacher, self.objectives))
        self.outputs = condense_teacher(outputs, self.objectives)
        return 0
