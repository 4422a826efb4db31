"""What a module's `training_step` calls `forward` with, and what it is answered."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from apprentice import keyed


class Calls:
    """Answers what `training_step` calls `forward` with.

    Attributes:
        inputs: what it was called with.
        noise: makes the context in which keyed noise was to be drawn.
    """

    def __init__(self, name: str, answer: Callable[[tuple[Tensor, ...]], Any]) -> None:
        self.name, self.answer, self.count = name, answer, 0
        self.inputs: tuple[Tensor, ...] = ()
        self.noise: Callable[[], AbstractContextManager] = nullcontext

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """The answer.

        Raises:
            ValueError: it is asked for again.
        """
        self.count += 1
        if self.count > 1:
            raise ValueError(f"{self.name}.training_step: expected one call of forward, got a second")
        self.inputs, self.noise = inputs, keyed.part(0, len(inputs[0]))
        return self.answer(inputs)

    @contextmanager
    def expected_once(self) -> Iterator[None]:
        """Raise ValueError where it is never asked for inside, whatever came of that."""
        none = f"{self.name}.training_step: expected one call of forward, got none"
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if self.count or "meta" not in str(error):
                raise
            raise ValueError(f"{none}: {error}") from error  # a layer was called itself that lives elsewhere
        if not self.count:
            raise ValueError(none)


class Stopped(BaseException):
    """Ends a step that was only to be asked."""


def known(answer: Any, _inputs: tuple[Tensor, ...]) -> Any:
    """Answer what is known already."""
    return answer


def stop(_inputs: tuple[Tensor, ...]) -> Any:
    """Answer nothing: what was asked is all there is to know."""
    raise Stopped
