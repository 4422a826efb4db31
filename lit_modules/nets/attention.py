"""Multi-head self-attention (Vaswani et al. 2017) with a choice of torch's kernels."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from apprentice.errors import BadInput, first_line

Backend = Literal["auto", "math", "flash", "efficient", "cudnn"]
KERNELS = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
NO_KERNEL = re.compile("No available kernel|No viable backend")
SELECTABLE = ("cpu", "cuda", "xpu", "meta")  # devices on which torch follows the choice of a kernel


class Cache:
    """Keys and values of up to `max_length` tokens that one causal attention layer has seen, for generation.

    Use one for each layer and batch of texts. It starts empty and grows by the tokens of x with each
    `SelfAttention.forward(x, cache)`; `length` is their number, and the position of the next. It holds no gradients:
    generate under `torch.no_grad()`.

    Args:
        max_length: tokens of a text at most.
        padding: (B,) int64, tokens before the first of each text, to which no token of the text attends; None for none.

    Raises:
        BadInput: it is full, holds another number of texts, or gradients are on.
    """

    def __init__(self, max_length: int, padding: Tensor | None = None) -> None:
        self.max_length, self.padding, self.length = max_length, padding, 0
        self._stored: Tensor | None = None  # (2, B, heads, max_length, D / heads): keys, then values

    def mask(self, count: int, device: torch.device) -> Tensor | None:
        """Return which cached tokens the last `count` attend to, (count, length) or (B, 1, count, length).

        None if that is all of them, or is what a causal kernel does by itself.
        """
        last = torch.arange(self.length - count, self.length, device=device)[:, None]
        slots = torch.arange(self.length, device=device)
        if self.padding is None:
            return None if count in {1, self.length} else slots <= last
        # A token of padding attends to itself: a softmax of nothing would be NaN in some kernels.
        seen: Tensor = (slots <= last) & ((slots >= self.padding[:, None, None]) | (slots == last))
        return seen[:, None]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, heads, t, D / heads); return those of all tokens (B, heads, length, D / heads)."""
        if keys.requires_grad:
            raise BadInput("", "a cache holds no gradients", "a call under torch.no_grad()")
        end = self.length + keys.shape[2]
        if end > self.max_length:
            raise BadInput("max_length", self.max_length, f"at least {end}, the tokens to be cached")
        if self._stored is None:
            self._stored = keys.new_empty(2, *keys.shape[:2], self.max_length, keys.shape[3])
        elif len(keys) != self._stored.shape[1]:
            raise BadInput("", f"{len(keys)} texts", f"the {self._stored.shape[1]} whose tokens are cached")
        self._stored[0, :, :, self.length : end], self._stored[1, :, :, self.length : end] = keys, values
        self.length = end
        return self._stored[0, :, :, :end], self._stored[1, :, :, :end]


class SelfAttention(nn.Module):
    """Multi-head self-attention, softmax(q kᵀ / √(D / heads)) v, with queries, keys and values from one matrix.

    Dropout of attention weights happens inside torch's kernel and draws from torch's generator, so it is not keyed as
    the suite's other dropout is. Under `torch.compile` a refusal may be a compiler error that quotes torch's.

    Args:
        embed_dim: D, width of tokens.
        num_heads: heads, a divisor of D, each of width D / heads.
        causal: whether a token attends only to itself and earlier tokens.
        dropout: probability that a weight is zero, in training; below 1.
        bias: whether the projections have one.
        backend: the kernel; `auto` leaves the choice to torch, another is used or refused, never replaced.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise BadInput("num_heads", num_heads, f"a divisor of embed_dim, {embed_dim}")
        if not 0 <= dropout < 1:
            raise BadInput("dropout", dropout, "at least 0, less than 1")
        check_backend(backend)
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.dropout, self.backend = float(dropout), backend
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias)
        # If several ranks compute it: its rows are of three matrices, and the rows of a head stay together.
        self.qkv.joined = (3, num_heads)  # type: ignore[assignment]
        self.out = nn.Linear(embed_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which may be a jagged nested tensor: texts of unequal lengths.

        With a cache, x holds the tokens after the cached ones, and attends to these too. A mask (B, 1, T, T) bool says
        which keys each query attends to, in place of `causal`.

        Raises:
            BadInput: the backend has no kernel for this input, with torch's reasons; the cache is full, or passed to
                attention that is not causal, with jagged texts or gradients; a nested tensor is strided.
        """
        if x.is_nested and x.layout != torch.jagged:
            raise BadInput("", "nested tensors", "torch.nested.nested_tensor(texts, layout=torch.jagged)")
        query, key, value = self._heads(x)
        causal = self.causal and mask is None
        if cache is not None:
            if not self.causal or x.is_nested:
                raise BadInput("cache", "a Cache", "None, but for causal attention over texts of one length (B, T, D)")
            past = cache.length
            key, value = cache.append(key, value)
            mask = cache.mask(x.shape[1], x.device)
            causal = mask is None and not past  # torch's `is_causal` would count from the first token
        output: Tensor = self.out(self._attend(query, key, value, mask, causal).transpose(1, 2).flatten(-2))
        return output

    def _heads(self, x: Tensor) -> list[Tensor]:
        """Project tokens (B, T, D) to queries, keys and values (B, heads, T, D / heads) of all heads or this rank's."""
        width = self.embed_dim // self.num_heads
        parts = self.qkv(x).chunk(3, -1)
        if x.is_nested and not (x.is_cuda and x.dtype != torch.float64 and self.backend != "math"):
            parts = [part.contiguous() for part in parts]  # for jagged texts torch's math kernel takes nothing else
        return [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        call = (query, key, value, mask, self.dropout if self.training else 0.0, causal)
        if self.backend == "auto" and not query.is_nested:
            return F.scaled_dot_product_attention(*call)
        with (
            restrict_kernels(self.backend, query) if torch.compiler.is_compiling() else use_kernel(self.backend, *call)
        ):
            return F.scaled_dot_product_attention(*call)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}, dropout={self.dropout}, backend={self.backend}"


def mask_texts(starts: Tensor) -> Tensor:
    """Return (B, 1, T, T) bool, true where a key is no later than a query and of the same text (see `Batch.starts`)."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return ((starts[:, :, None] == starts[:, None]) & (places[:, None] >= places))[:, None]


@contextmanager
def any_kernel(module: nn.Module) -> Iterator[None]:
    """Inside, attention in this module may use any kernel, to learn shapes on another device than that of training."""
    backends = {m: m.backend for m in module.modules() if isinstance(m, SelfAttention)}
    for attention in backends:
        attention.backend = "auto"
    try:
        yield
    finally:
        for attention, backend in backends.items():
            attention.backend = backend


def check_backend(backend: str) -> None:
    """Raise BadInput for an unknown backend."""
    if backend not in get_args(Backend):
        raise BadInput("backend", backend, f"one of {', '.join(get_args(Backend))}")


@contextmanager
def use_kernel(backend: str, query: Tensor, *others: Any) -> Iterator[None]:
    """Inside, `scaled_dot_product_attention(query, *others)` uses this kernel; `auto` leaves the choice to torch.

    The choice is global to the process: two threads can't use different kernels at once.

    Raises:
        BadInput: the kernel does not serve this call; the message has torch's reasons.
    """
    check_backend(backend)
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
        reasons = " ".join([first_line(error), *_collect_reasons(backend, query, *others)])
        raise BadInput("backend", backend, f"a kernel that serves attention of {kind}; torch says: {reasons}") from None


def restrict_kernels(backend: str, query: Tensor) -> AbstractContextManager[None]:
    """Inside, torch may use this kernel alone."""
    if backend == "auto" and query.is_nested and query.device.type == "cpu":
        backend = "math"  # the only one; torch would ask a GPU about the others
    return nullcontext() if backend == "auto" else sdpa_kernel(KERNELS[backend])


def _collect_reasons(backend: str, query: Tensor, *others: Any) -> list[str]:
    """Repeat a rejected call and collect torch's reasons: its warnings, and for jagged texts its log."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.nested._internal.sdpa")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned, suppress(RuntimeError), restrict_kernels(backend, query):
            warnings.simplefilter("always")
            F.scaled_dot_product_attention(query, *others)
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
    messages = [str(warning.message) for warning in warned]
    return [*_filter_reasons(backend, logged), *_filter_reasons(backend, messages)]


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
