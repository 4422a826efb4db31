"""The call of `forward` in a module's `training_step`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from apprentice import keyed


class Stopped(BaseException):
    """Ends a `training_step` at its call of `forward`."""


class ForwardCall:
    """Stands in for a module's `forward` during one `training_step`; without `answer` the step ends there."""

    def __init__(self, module: str, answer: Callable[[tuple[Tensor, ...]], Any] | None) -> None:
        self.expected = f"{module}.training_step: expected one call of forward"
        self.answer, self.called = answer, False
        self.inputs: tuple[Tensor, ...] = ()
        self.noise: Callable[[], AbstractContextManager] = nullcontext  # the keyed noise of the call

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        """The answer; raises ValueError at a second call."""
        if self.called:
            raise ValueError(f"{self.expected}, got a second")
        self.called = True
        self.inputs, self.noise = inputs, keyed.part(0, len(inputs[0]))
        if self.answer is None:
            raise Stopped
        return self.answer(inputs)

    @contextmanager
    def required(self) -> Iterator[None]:
        """Raise ValueError if `forward` is not called inside."""
        none = f"{self.expected}, got none"
        try:
            yield
        except Stopped:
            pass
        except (RuntimeError, NotImplementedError) as error:
            if self.called or "meta" not in str(error):
                raise
            raise ValueError(f"{none}: {error}") from error  # the step called a layer of another rank
        if not self.called:
            raise ValueError(none)
