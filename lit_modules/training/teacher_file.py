"""The outputs of a teacher that is in a file: what stands in the place of a store of a live teacher's."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from apprentice.batch import Batch
from lit_modules.nets.output_file import Outputs as StoredOutputs
from lit_modules.nets.outputs import Outputs
from lit_modules.objectives.base import Objective, condense_teacher
from lit_modules.training.teacher import Teacher, layers_read


class TeacherFile:
    """The outputs for all training samples, as objectives read them, on a rank's device."""

    folder = None

    def __init__(self, teacher: StoredOutputs) -> None:
        self.teacher = teacher
        self.outputs: Outputs | None = None
        self.objectives: Mapping[str, Objective] = {}

    @property
    def is_filled(self) -> bool:
        return self.outputs is not None

    def set_objectives(self, objectives: Mapping[str, Objective]) -> None:
        self.objectives = objectives

    def is_wanted(self, data: Any, epochs: float) -> bool:
        """Whether the teacher runs otherwise: this one never does."""
        return True

    def fill(self, data: Any, teacher: Teacher, trainer: Trainer) -> int:
        """Take them from the teacher, who has found those of the data; none are computed."""
        places = torch.arange(len(self.teacher.part("train")), device=trainer.strategy.root_device)
        outputs = self.teacher.rows("train", places, layers_read(self.teacher, self.objectives))
        self.outputs = condense_teacher(outputs, self.objectives)
        return 0

    def rows(self, batch: Batch) -> Outputs:
        assert self.outputs is not None
        return self.outputs.map(lambda x: x[batch.index])

    def reduce(self, outputs: Outputs, _batch: Batch) -> Outputs:
        return outputs

    def clear(self) -> None:
        self.outputs = None
