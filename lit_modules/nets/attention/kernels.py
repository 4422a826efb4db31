"""The choice of torch's kernels of `scaled_dot_product_attention`."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from apprentice.errors import BadInput, first_line
from lit_modules.nets.attention.form import check_backend

KERNELS = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
NO_KERNEL = re.compile("No available kernel|No viable backend")
SELECTABLE = ("cpu", "cuda", "xpu", "meta")  # devices on which torch follows the choice of a kernel


@contextmanager
def use_kernel(backend: str, query: Tensor, *others: Any, **options: Any) -> Iterator[None]:
    """Inside, `scaled_dot_product_attention(query, *others, **options)` uses this kernel; with `auto` torch chooses.

    The choice is global to the process: two threads can't use different kernels at once.

    Raises:
        BadInput: the kernel does not serve this call; the message has torch's reasons.
    """
    check_backend(backend)
    if backend == "flex":
        raise BadInput("backend", backend, f"one of auto, {', '.join(KERNELS)}: it is another function")
    device = query.device.type
    kind = f"{str(query.dtype).removeprefix('torch.')} {'jagged' if query.is_nested else 'dense'} on {device}"
    if backend not in {"auto", "math"} and device not in SELECTABLE:
        raise BadInput("backend", backend, f"auto or math: torch chooses the kernel itself for {kind}")
    try:
        with restrict_kernels(backend, query):
            yield
    except RuntimeError as error:
        needs_gpu = device == "cpu" and isinstance(error, torch.AcceleratorError)  # for jagged texts, without a GPU
        if not needs_gpu and not NO_KERNEL.search(str(error)):
            raise
        reasons = " ".join([first_line(error), *_collect_reasons(backend, query, *others, **options)])
        raise BadInput("backend", backend, f"a kernel that serves attention of {kind}; torch says: {reasons}") from None


def restrict_kernels(backend: str, query: Tensor) -> AbstractContextManager[None]:
    """Inside, torch may use this kernel alone."""
    if backend == "auto" and query.is_nested and query.device.type == "cpu":
        backend = "math"  # the only one; torch would ask a GPU about the others
    return nullcontext() if backend == "auto" else sdpa_kernel(KERNELS[backend])


class _MessageHandler(logging.Handler):
    """Keeps the messages that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _collect_reasons(backend: str, query: Tensor, *others: Any, **options: Any) -> list[str]:
    """Repeat a rejected call and collect torch's reasons: its warnings, and for jagged texts its log."""
    handler = _MessageHandler()
    logger = logging.getLogger("torch.nested._internal.sdpa")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned, suppress(RuntimeError), restrict_kernels(backend, query):
            warnings.simplefilter("always")
            F.scaled_dot_product_attention(query, *others, **options)
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
    messages = [str(warning.message) for warning in warned]
    return [*_filter_reasons(backend, handler.messages), *_filter_reasons(backend, messages)]


def _filter_reasons(backend: str, messages: list[str]) -> list[str]:
    """Keep the reasons against this backend in torch's messages; all reasons, if none names a backend."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for message in messages:
        reason = message.partition("(Triggered internally at")[0].strip()
        if reason.endswith("not used because:"):
            sections.append((reason.lower(), []))
        elif "runtime disabled" not in reason:  # true of all kernels but the chosen one
            sections[-1][1].append(reason)
    matching = [reasons for header, reasons in sections if len(sections) == 1 or backend == "auto" or backend in header]
    return list(dict.fromkeys(reason for reasons in matching for reason in reasons))
