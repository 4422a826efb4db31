"""How attention makes its scores, and which kernel computes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from apprentice.errors import BadInput

QKNorm = bool | Literal["width"]  # of queries and keys: none, of each head, or of all heads at once
Backend = Literal["auto", "math", "flash", "efficient", "cudnn", "flex"]  # flex: see `lit_modules.nets.attention.flex`


def check_backend(backend: str) -> None:
    """Raise BadInput for an unknown backend."""
    if backend not in get_args(Backend):
        raise BadInput("backend", backend, f"one of {', '.join(get_args(Backend))}")


@dataclass
class Form:
    """How scores are made, and which kernel computes them.

    Args:
        scale: of q · k; None for 1 / √(width of a key).
        softcap: c of scores c · tanh(score / c), before the mask (Gemma 2, arXiv:2408.00118); None for none.
        backend: the kernel.

    Raises:
        BadInput: a value can't be used, or the kernel has no softcap.
    """

    scale: float | None = None
    softcap: float | None = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        check_backend(self.backend)
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(name, value, "a number above 0, or None")
        if self.softcap is not None and self.backend not in {"auto", "math", "flex"}:
            raise BadInput("backend", self.backend, "auto, math or flex: no other kernel has a softcap")


@contextmanager
def any_kernel(module: nn.Module) -> Iterator[None]:
    """Inside, attention in this module may use any kernel, to learn shapes on another device than that of training."""
    forms = [form for m in module.modules() if isinstance(form := getattr(m, "form", None), Form)]
    backends = [form.backend for form in forms]
    for form in forms:
        form.backend = "auto"
    try:
        yield
    finally:
        for form, backend in zip(forms, backends, strict=True):
            form.backend = backend
