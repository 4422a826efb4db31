"""Texts that language models write: each token is drawn by a key, so that it depends on no other text."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput, reason
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.base import evaluating
from lit_modules.nets.layers import PLACES

Decoder = Callable[[Tensor], Tensor]  # the next tokens (b, t), t > 0 -> logits (b, V) after the last of them
# Of log-probabilities, between a decoder and one pass; in 16 bits, roundings of the largest logit.
TOLERANCE, ROUNDINGS = 1e-2, 8


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from this many of the likeliest tokens, and those as likely as the last; default: from all.
        top_p: draw from the likeliest tokens whose probabilities reach this sum together; default: from all.

    Raises:
        BadInput: a value can't be used.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise BadInput("temperature", self.temperature, "0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput("top_k", self.top_k, "at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput("top_p", self.top_p, "above 0, at most 1")

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Return tokens (b,) at the places `uniform` (b,) of the distribution of logits (b, V), in float64."""
        if self.temperature == 0:
            return logits.argmax(1)
        z = logits.double() / self.temperature
        if self.top_k is not None:
            z = z.masked_fill(z < z.topk(min(self.top_k, z.shape[1])).values[:, -1:], -math.inf)
        p = z.softmax(1)
        if self.top_p is not None:
            ordered = p.sort(1, descending=True).values
            least = ordered.masked_fill(ordered.cumsum(1) - ordered >= self.top_p, math.inf).amin(1, keepdim=True)
            p = p.where(p >= least, 0.0)
        reached = p.cumsum(1)
        places = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)
        return places[:, 0].clamp(max=z.shape[1] - 1)  # beyond the last if logits are NaN


class Generated(NamedTuple):
    """Responses of b prompts."""

    tokens: Tensor  # (b, N) int64, N the most tokens that were asked for; 0 after a row's last token
    lengths: Tensor  # (b,) int64, the tokens of each row, its end token among them; 0 where there was no room


class CachedDecoder:
    """Computes a net's next logits by caches of its layers, whose texts may be reordered (beams) and cut (drafts).

    Args:
        compute: tokens (b, t), their first place, the padding and the caches to what the head reads, (b, t, D).
        head: that to logits, (..., D) to (..., V).
        caches: of the layers, see `MixerCache`.
        padding: (b,) int64, tokens before the first of each text; None for none.

    Attributes:
        length: tokens seen, padding among them.
    """

    def __init__(
        self, compute: Callable[..., Tensor], head: Callable[[Tensor], Tensor], caches: Sequence[Any],
        padding: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.compute, self.head, self.caches, self.padding, self.length = compute, head, caches, padding, 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits (b, V) after the last of tokens (b, t), which follow those that were seen."""
        return self.head(self._append(tokens)[:, -1])

    def every(self, tokens: Tensor) -> Tensor:
        """Return logits (b, t, V) after each of tokens (b, t), which follow those that were seen: to check a draft."""
        return self.head(self._append(tokens))

    def _append(self, tokens: Tensor) -> Tensor:
        x = self.compute(tokens, self.length, self.padding, self.caches)
        self.length += tokens.shape[1]
        return x

    def reorder(self, rows: Tensor) -> None:
        """Go on with the texts of these numbers (b,) int64: some may be left out, repeated or in another order."""
        self._change("reorder", rows)
        self.padding = None if self.padding is None else self.padding[rows]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens alone, padding among them; BadInput if some layer can't take tokens back."""
        self._change("crop", length)
        self.length = length

    def _change(self, method: str, value: Any) -> None:
        """Call a method of all caches, or change none; BadInput if one, of a user's mixer, has no such method."""
        changed = [copy.copy(cache) for cache in self.caches]
        for cache in changed:
            if not hasattr(cache, method):
                raise BadInput("cache", type(cache).__name__, f"one with {method}(), as MixerCache has")
            getattr(cache, method)(value)
        self.caches = changed


def longest_text(net: nn.Module | None) -> int | None:
    """Return the most tokens that a net's texts can have: its `longest_text` if it has one, else its `block_size`."""
    longest: int | None = getattr(net, "longest_text", getattr(net, "block_size", None))
    return longest


def row_keys(samples: Tensor, *keys: int) -> Tensor:
    """Return keys (b,) of `generate` for the samples (b,) int64, such as places in a set, by keys as seed and step."""
    return keyed.bits(keyed.fold_in(*keys), samples)[:, 0]


def generate(
    net: nn.Module, prompts: Tensor, lengths: Tensor, max_new_tokens: int, keys: Tensor | None = None,
    sampling: Sampling | None = None, ends: Sequence[int] = (), cached: bool = True,
) -> Generated:  # fmt: skip
    """Continue prompts, each by the draws of its key: other rows change a row by the rounding of logits only.

    The net is in eval mode and without gradients meanwhile. One whose `decoder(capacity, padding)` is not None caches
    what it has computed; any other net from tokens (b, T) to logits (b, T, V) computes all tokens again for each new
    one.

    Args:
        net: tokens to logits; texts do not grow beyond its `longest_text`.
        prompts: (b, T) integers, padded on the right with any tokens.
        lengths: (b,) of the prompts; a row of 0 stays without a response.
        max_new_tokens: N, of each row at most.
        keys: (b,) int64 of 32 bits, see `row_keys`; needed unless the temperature is 0.
        sampling: how tokens are drawn.
        ends: tokens after which a row ends.
        cached: whether to use the net's decoder.
    """
    sampling = sampling or Sampling()
    longest = longest_text(net)
    room = torch.full_like(lengths, max_new_tokens)
    if longest is not None:
        room = room.minimum(longest - lengths)
    room = room.where(lengths > 0, 0).clamp(min=0)
    tokens = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=prompts.device)
    counts, rows = torch.zeros_like(room), room.nonzero()[:, 0]
    if len(rows):
        uniform = torch.zeros(len(rows), max_new_tokens, dtype=torch.float64, device=prompts.device)
        if sampling.temperature:
            assert keys is not None, "draws need keys"
            uniform = (keyed.bits(0, keys[rows], max_new_tokens).double() + 0.5) / 2**32
        start, padding = _align(prompts[rows].long(), lengths[rows])
        with evaluating(net):
            decoder = _decoder(net, start.shape[1] + max_new_tokens, padding, cached)
            tokens[rows], counts[rows] = _write(decoder, start, uniform, room[rows], sampling, ends)
    return Generated(tokens, counts)


def _align(prompts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """Move the padding of prompts (b, T) to the left; return also its size in each row (b,), None if there is none."""
    width = int(lengths.max())
    padding = width - lengths
    if not padding.any():
        return prompts[:, :width], None
    places = torch.arange(width, device=prompts.device) - padding[:, None]
    return prompts.gather(1, places.clamp(min=0)), padding


def _write(
    decoder: Decoder, start: Tensor, uniform: Tensor, room: Tensor, sampling: Sampling, ends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Draw tokens (b, N) with the uniform numbers (b, N), `room` (b,) at most in a row; return also their numbers."""
    tokens = torch.zeros(uniform.shape, dtype=torch.int64, device=start.device)
    counts, stops, new = torch.zeros_like(room), torch.tensor(ends, dtype=torch.int64, device=start.device), start
    alive = room > 0
    for place in range(uniform.shape[1]):
        drawn = sampling.draw(decoder(new), uniform[:, place])
        tokens[:, place], counts = drawn.where(alive, 0), counts + alive
        alive = alive & (counts < room) & ~torch.isin(drawn, stops)
        if not alive.any():
            break
        new = drawn[:, None]
    return tokens, counts


def _decoder(net: nn.Module, capacity: int, padding: Tensor | None, cached: bool = True) -> Decoder:
    make: Any = getattr(net, "decoder", None) if cached else None
    decoder: Decoder | None = None if make is None else make(capacity, padding)
    return decoder or Recomputing(net, padding)


class Recomputing:
    """A decoder for any net: all tokens again, padded on the right."""

    def __init__(self, net: nn.Module, padding: Tensor | None) -> None:
        self.net, self.padding = net, padding
        self.text: Tensor | None = None  # (b, T), padded on the left

    def __call__(self, tokens: Tensor) -> Tensor:
        self.text = text = tokens if self.text is None else torch.cat([self.text, tokens], 1)
        last = torch.full_like(text[:, 0], text.shape[1] - 1)
        if self.padding is not None:
            places = torch.arange(text.shape[1], device=text.device) + self.padding[:, None]
            text, last = text.gather(1, places.clamp(max=text.shape[1] - 1)), last - self.padding
        longest = longest_text(self.net) or text.shape[1]  # rows that have ended may be beyond it
        logits: Tensor = self.net(text[:, :longest])
        return logits[torch.arange(len(text)), last.clamp(max=longest - 1)]


@torch.no_grad()
def check_writer(net: nn.Module, flag: str = "net", padded: bool = True) -> None:
    """Raise BadInput unless the net writes: tokens to logits (b, T, V), and its decoder gives those of one pass.

    Args:
        net: which may be a user's own.
        flag: by which it was chosen.
        padded: whether texts of unequal lengths are tried.
    """
    device, name = next(net.parameters()).device, type(net).__name__
    texts, lengths = torch.tensor([[0, 1, 0], [1, 0, 0]], device=device), torch.tensor([3, 1 if padded else 3])
    with evaluating(net):
        logits = net(texts)
        if logits.dim() != 3 or logits.shape[:2] != texts.shape:
            raise BadInput(flag, name, f"a language model, with logits (b, T, V); it gives {tuple(logits.shape)}")
        start, padding = _align(texts, lengths)
        try:
            decoder = _decoder(net, 4, padding)
            first, second = decoder(start), decoder(texts.new_tensor([[0], [0]]))
        except Exception as error:  # noqa: BLE001 - whatever a user's mixer does with a cache
            raise BadInput(flag, name, f"a net that continues texts; it says: {reason(error)}") from None
        expected = net(torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0]], device=device))
    # Both may be -inf, of a token that the net lacks.
    largest, again = float(logits.masked_fill(logits == -math.inf, 0.0).abs().max()), expected[:, :3]
    rounding = ROUNDINGS * torch.finfo(logits.dtype).eps
    if not (again - logits).where(again != logits, 0.0).abs().max() <= max(PLACES, rounding) * largest:
        raise BadInput(flag, name, "a language model: what it gives for a token depends on no later ones")
    ends = [int(length) - 1 for length in lengths]
    pairs = [(first, expected[[0, 1], ends]), (second, expected[[0, 1], [end + 1 for end in ends]])]
    log_p = [(widen(a).log_softmax(-1), widen(b).log_softmax(-1)) for a, b in pairs]
    errors = [(a - b).where(a != b, 0.0).abs().max() for a, b in log_p]
    if not max(errors) < max(TOLERANCE, rounding * largest):
        of_texts = "of padded texts " if padded else ""
        raise BadInput(flag, name, f"a model whose cached keys and values {of_texts}give the logits of one pass")
