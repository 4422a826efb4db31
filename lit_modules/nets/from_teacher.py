"""Students that are made of their teacher's own weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from lit_modules.nets.base import Net

Say = Callable[[str], None]  # takes a line about how far a measurement is


class FromTeacher(Net, ABC):
    """What says how a student is made of a teacher: it is no net by itself, `make` gives the student.

    Attributes:
        plan_class: a named tuple of plain values, which says what is made: it is written into a run's folder.
        kind: the word for that in the name of its file.
    """

    plan_class: ClassVar[type]
    kind: ClassVar[str]

    @abstractmethod
    def first(self, teacher: nn.Module) -> Any:
        """Return a plan without measuring, to check the options and the student's shape.

        Raises:
            BadInput: an option can't be used with this teacher.
        """

    @abstractmethod
    def choose(self, teacher: nn.Module, tokens: Tensor, labels: Tensor, say: Say = lambda _: None) -> Any:
        """Return a plan by tokens (b, T) and labels (b, T), of which -100 counts nowhere; `say` how far it is.

        Raises:
            BadInput: as `first`.
        """

    @abstractmethod
    def make(self, teacher: nn.Module, plan: Any) -> nn.Module:
        """Return the student of a plan, with the teacher's weights."""
