"""What is stored of a distribution over V tokens: all of it, k tokens with the mass of the others, or k draws."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice import keyed
from apprentice.errors import BadInput
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.outputs import Outputs, TopTokens
from lit_modules.objectives.top_k import TAILS, Tail

TopK: TypeAlias = int | Literal["all"]
USUAL = 1.0, 2.0  # temperatures for which a tail is stored, whatever the methods: 2 bytes each
MOST = 2**16  # tokens of a distribution
KEY = tuple(b"top_k")  # of the draws
AT_A_TIME = 256  # tokens, of whose logits copies are made
LEAST_TAIL = 2.0**-24  # mass of the tokens that a served teacher does not tell of: the rounding of float32 at 1


@dataclass(frozen=True)
class Stored:
    """What is to be stored of a teacher: `teacher_top_k`, `teacher_tail`.

    Attributes:
        top_k: tokens, or all.
        tail: what stands for the others: see `Form`.
        source: what tells the teacher without its weights; by default a hash of what it computes with does.
        temperatures: beside those of the methods, of methods that are to read the same file.
        is_served: whether the teacher tells of its likeliest tokens alone, at temperature 1: see `Served`.
    """

    top_k: TopK
    tail: Tail = "bucket"
    source: str | None = None
    temperatures: tuple[float, ...] = ()
    is_served: bool = False

    def __post_init__(self) -> None:
        if self.top_k != "all" and not (isinstance(self.top_k, int) and 1 <= self.top_k <= MOST):
            raise BadInput("teacher_top_k", self.top_k, f"a number of tokens, 1 to {MOST}, or all")
        if self.tail not in TAILS:
            raise BadInput("teacher_tail", self.tail, " or ".join(TAILS))


@dataclass(frozen=True)
class Form:
    """How a distribution is stored.

    Attributes:
        k: tokens that are stored; None for all, in the bits of the logits.
        tail: what stands for the others: their mass as one `bucket`; nothing, as k tokens are drawn (`sample`) or the
            distribution among the k is taken (`renormalize`).
        temperatures: for which tails or draws are stored, as they can't be computed from those at 1.
    """

    k: int | None
    tail: Tail
    temperatures: tuple[float, ...]

    @classmethod
    def of(cls, stored: "Stored", temperatures: Collection[float], classes: int) -> "Form":
        """Make that of V classes, as large as the flags say; BadInput for what a served teacher does not tell."""
        top_k, tail = stored.top_k, stored.tail
        if stored.is_served:
            _check_served(stored, classes)
        if top_k == "all" or (top_k >= classes and tail != "sample"):
            return cls(None, "bucket", ())
        usual = (1.0,) if stored.is_served else USUAL
        at = {"bucket": {*usual, *temperatures}, "sample": {*temperatures}, "renormalize": set[float]()}
        return cls(top_k, tail, tuple(sorted(map(float, at[tail]))))

    def __str__(self) -> str:
        return "all tokens" if self.k is None else f"{self.k} tokens, {self.tail}"

    def reduce(self, logits: Tensor, first: int) -> dict[str, Tensor]:
        """Return what is stored of logits (n, V), on the CPU; `first` is the first one's number, which keys draws."""
        starts = range(0, max(len(logits), 1), AT_A_TIME)
        parts = [self._reduce(widen(logits[start : start + AT_A_TIME]), first + start) for start in starts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _reduce(self, z: Tensor, first: int) -> dict[str, Tensor]:
        if self.k is None:
            return {"logits": z.detach().cpu()}
        if self.tail == "sample":
            return {"draws": self._draw(z, first).cpu().to(_number(z.shape[-1]))}
        log_p, tokens = F.log_softmax(z, -1).topk(self.k)
        return self._pack(log_p, tokens, self._tails(z, tokens), z.shape[-1])

    def pack_served(self, log_p: Tensor, tokens: Tensor, classes: int) -> dict[str, Tensor]:
        """Return what is stored of a served teacher's k log-probabilities and tokens (n, k), of V classes.

        The mass of the others, at temperature 1, is what is missing to 1; float32 tells none below 2^-24.
        """
        tails = torch.log1p(-log_p.exp().sum(-1).clamp(max=1 - LEAST_TAIL))
        return self._pack(log_p, tokens, tails[:, None].expand(-1, len(self.temperatures)), classes)

    @staticmethod
    def _pack(log_p: Tensor, tokens: Tensor, tails: Tensor, classes: int) -> dict[str, Tensor]:
        return {"tokens": tokens.cpu().to(_number(classes)), "log_p": _half(log_p), "tails": _half(tails)}

    def _tails(self, z: Tensor, tokens: Tensor) -> Tensor:
        others = F.log_softmax(z, -1).scatter(-1, tokens, -torch.inf)
        tails = [(others / t).logsumexp(-1) for t in self.temperatures]
        return torch.stack(tails, -1) if tails else z.new_zeros(len(z), 0)

    def _draw(self, z: Tensor, first: int) -> Tensor:
        """(n, temperatures, k) int64: one token from each k-th of the distribution, which varies less than k from all.

        Each draw j is the token at the place (j + u) / k of the cumulative distribution, u uniform: the mean share of a
        token among the k is its probability.
        """
        assert self.k is not None
        numbers, draws = torch.arange(first, first + len(z)), []
        for t in self.temperatures:
            u = keyed.bits(keyed.fold_in(*KEY, *np.float64(t).tobytes()), numbers, self.k).double() / 2**32
            places = (torch.arange(self.k) + u) / self.k
            mass = F.softmax(z.double().cpu() / t, -1).cumsum(-1)
            draws.append(torch.searchsorted(mass, places * mass[:, -1:], right=True).clamp(max=z.shape[-1] - 1))
        return torch.stack(draws, 1)

    def expand(self, stored: Mapping[str, Tensor], counts: Tensor) -> Outputs:
        """Return the outputs of texts of whose tokens at `counts` (b, T) bool this is stored; others have zeros."""

        def place(x: Tensor) -> Tensor:
            whole = x.new_zeros(*counts.shape, *x.shape[1:])
            whole[counts.cpu()] = x
            return whole.to(counts.device)

        if self.k is None:
            return Outputs(place(stored["logits"]), {})
        if self.tail == "sample":
            draws = {t: place(stored["draws"][:, i].long()) for i, t in enumerate(self.temperatures)}
            top_k = TopTokens(None, {}, draws)
            return Outputs(torch.zeros(*counts.shape, self.k, device=counts.device), {}, top_k=top_k)
        tails = {t: place(stored["tails"][:, i].float()) for i, t in enumerate(self.temperatures)}
        top_k = TopTokens(place(stored["tokens"].long()), tails, {})
        return Outputs(place(stored["log_p"].float()), {}, top_k=top_k)


def _half(x: Tensor) -> Tensor:
    """Round to float16 as NumPy does, of float64 in one step."""
    return torch.from_numpy(x.numpy(force=True).astype(np.float16))


def _number(classes: int) -> torch.dtype:
    """Return the type in which tokens of V classes are stored."""
    return torch.uint16 if classes <= 2**16 else torch.int32


def _check_served(stored: Stored, classes: int) -> None:
    """Raise BadInput for a form that needs more than the likeliest tokens."""
    if stored.top_k == "all" or stored.top_k >= classes:
        expected = f"a number of tokens below the vocabulary's {classes:,} beside `teacher Served`, which tells no more"
        raise BadInput("teacher_top_k", stored.top_k, expected)
    if stored.tail == "sample":
        expected = "bucket or renormalize beside `teacher Served`, which tells of no other tokens"
        raise BadInput("teacher_tail", stored.tail, expected)
