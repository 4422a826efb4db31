"""Keys and values of tokens that were seen before."""

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.attention.masks import visible
from lit_modules.nets.attention.mixer_cache import MixerCache


class Cache(MixerCache):
    """Keys and values of up to `max_length` tokens that one causal attention layer has seen, for generation.

    Use one for each layer and batch of texts. It starts empty and grows by the tokens of x with each
    `SelfAttention.forward(x, cache)`; `length` is their number, and the position of the next. It holds no gradients:
    generate under `torch.no_grad()`. With a window it keeps only the last `window` tokens and the first `sinks`.

    Args:
        max_length: tokens of a text at most.
        padding: (B,) int64, tokens before the first of each text, to which no token of the text attends; None for none.
        window: the last tokens to keep, those to which a token attends; None for all.
        sinks: the first tokens of each text to keep beside them.

    Raises:
        BadInput: it is full, holds another number of texts, or gradients are on.
    """

    def __init__(
        self, max_length: int, padding: Tensor | None = None, window: int | None = None, sinks: int = 0
    ) -> None:
        super().__init__(padding)
        self.max_length = max_length
        self.window, self.sinks = window, sinks if window is not None else 0
        self.slots = max_length if window is None else min(max_length, window + sinks)
        self._stored: list[Tensor] = []  # keys and values (B, heads, slots, width)
        self._places: Tensor | None = None  # of the keys that `append` returned last; None: of all, or of the slots

    def reorder(self, rows: Tensor) -> None:
        self._places = None  # which have no row a text
        super().reorder(rows)

    def take_back(self, length: int) -> None:
        if self.length > self.slots:
            expected = f"{self.length}, all tokens: those that left the window of {self.window} are not kept"
            raise BadInput("length", length, expected)

    def mask(self, count: int, device: torch.device, window: int | None = None, sinks: int = 0) -> Tensor | None:
        """Return which keys that `append` returned the last `count` attend to, (count, n) or (B, 1, count, n).

        None if that is all of them, or is what a causal kernel does by itself.
        """
        if self.padding is None:
            kept = self.window is not None and (self.window, self.sinks) == (window, sinks)
            near = window is None or self.length <= window
            if (count == 1 and (kept or near)) or (count == self.length and near):
                return None
        last, places = self.places(count, device)
        return visible(last, places, window, sinks, self.padding)

    def places(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the places (count,) of the last tokens, and (n,) or (B, n) of the keys that `append` returned."""
        last = torch.arange(self.length - count, self.length, device=device)
        if self._places is not None:
            return last, self._places
        if self.window is not None:
            return last, self._places_of(min(self.length, self.slots), device)
        return last, torch.arange(self.length, device=device)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, heads, t, width); return those (B, heads, n, width) that the t may attend to.

        Without a window these are of all tokens.
        """
        if keys.requires_grad:
            raise BadInput("", "a cache holds no gradients", "a call under torch.no_grad()")
        end = self.length + keys.shape[2]
        if end > self.max_length:
            raise BadInput("max_length", self.max_length, f"at least {end}, the tokens to be cached")
        if not self._stored:
            slots = self.slots + (self.window is not None and self.padding is not None)  # one for what is not kept
            # A slot of a window may be read, and masked, before it is written: 0 times NaN would be NaN.
            make = torch.empty if self.window is None else torch.zeros
            self._stored = [
                make((*x.shape[:2], slots, x.shape[3]), dtype=x.dtype, device=x.device) for x in (keys, values)
            ]
        elif len(keys) != len(self._stored[0]):
            raise BadInput("", f"{len(keys)} texts", f"the {len(self._stored[0])} whose tokens are cached")
        if self.window is None:
            for stored, new in zip(self._stored, (keys, values), strict=True):
                stored[:, :, self.length : end] = new
            self.length = end
            return self._stored[0][:, :, :end], self._stored[1][:, :, :end]
        return self._append_to_window(keys, values)

    def _append_to_window(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        start, count, device = self.length, keys.shape[2], keys.device
        held = min(start, self.slots)
        if count == 1 and self.padding is None:  # the token that leaves the window is no longer needed
            self._write(keys, values)
            held, self._places = min(self.length, self.slots), None
            return self._stored[0][:, :, :held], self._stored[1][:, :, :held]
        new = torch.arange(start, start + count, device=device)
        old = self._places_of(held, device)
        self._places = torch.cat([old, new.expand(*old.shape[:-1], count)], -1)
        both = [torch.cat([s[:, :, :held], x], 2) for s, x in zip(self._stored, (keys, values), strict=True)]
        self._write(keys, values)
        return both[0], both[1]

    def _places_of(self, held: int, device: torch.device) -> Tensor:
        """Return the places (held,) or (B, held) of the tokens in the first slots; `max_length` for an empty slot.

        Counted from its text's first one, token r is in slot r, if it is a sink, or in sinks + (r - sinks) % window.
        """
        assert self.window is not None
        first: Tensor | int = 0 if self.padding is None else self.padding[:, None]
        slots = torch.arange(held, device=device)
        last = self.length - 1 - first  # of each text
        laps = torch.div(last - slots, self.window, rounding_mode="floor")
        rows = torch.where(slots < self.sinks, slots, slots + laps * self.window)
        written = slots <= last
        return torch.where(written, rows + first, self.max_length)

    def _write(self, keys: Tensor, values: Tensor) -> None:
        """Write what stays visible of new tokens (B, heads, t, width)."""
        assert self.window is not None
        start, end = self.length, self.length + keys.shape[2]
        self.length = end
        if self.padding is None:
            sinks, recent = range(start, min(end, self.sinks)), range(max(start, self.sinks, end - self.window), end)
            for kept in filter(len, (sinks, recent)):
                slots = [r if r < self.sinks else self.sinks + (r - self.sinks) % self.window for r in kept]
                places = slots if len(slots) > 1 else slice(slots[0], slots[0] + 1)  # a slice needs no index tensor
                for stored, new in zip(self._stored, (keys, values), strict=True):
                    stored[:, :, places] = new[:, :, kept.start - start : kept.stop - start]
            return
        rows = torch.arange(start, end, device=keys.device) - self.padding[:, None]  # (B, t)
        last = end - self.padding[:, None]
        kept_rows = (rows >= 0) & ((rows < self.sinks) | (rows >= last - self.window))
        slots_of_rows = torch.where(rows < self.sinks, rows, self.sinks + (rows - self.sinks) % self.window)
        slots_of_rows = torch.where(kept_rows, slots_of_rows, self.slots)[:, None, :, None]
        for stored, new in zip(self._stored, (keys, values), strict=True):
            stored.scatter_(2, slots_of_rows.expand_as(new), new)
