"""Positions inside attention: rotations of queries and keys, or a bias of scores by distance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apprentice.errors import BadInput

LENGTH = "original_max_position_embeddings"  # of the texts of pretraining, L0
# What each kind of scaling needs, and may have.
SCALINGS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", LENGTH}, set()),
    "yarn": ({"factor", LENGTH}, {
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    }),
}  # fmt: skip

BETAS = {"beta_fast": 32, "beta_slow": 1}  # of yarn, unless given
RANGES = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs (m, m + d/2) turn by base^(-2m/d) radians a token.

    The pairs are those of transformers; Meta's weights pair (2m, 2m + 1). Angles are computed in float64, so a text's
    scores are the same wherever it starts in a row.

    Args:
        base: of the frequencies.
        scaling: for texts longer than those of pretraining, as transformers' `rope_parameters`: `rope_type` linear
            (with `factor`), llama3 (`factor`, `low_freq_factor`, `high_freq_factor`,
            `original_max_position_embeddings`) or yarn (arXiv:2309.00071; `factor`,
            `original_max_position_embeddings`, and what it may have). `dynamic` and `longrope` are refused: their
            frequencies depend on the text's length, and cached keys would be of others.
        fraction: of a head's width that turns, the first of it (Phi-4-mini: 0.75); the rest has no position.

    Raises:
        BadInput: the base is not above 1, the scaling is not one of these, or the fraction is not above 0, at most 1.
    """

    base: float = 10000.0
    scaling: Mapping[str, Any] | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 1 < self.base < math.inf:
            raise BadInput("base", self.base, "more than 1")
        if not 0 < self.fraction <= 1:
            raise BadInput("fraction", self.fraction, "above 0, at most 1")
        if self.scaling is not None and not isinstance(self.scaling, Mapping):
            raise BadInput("scaling", self.scaling, "a mapping, as {rope_type: linear, factor: 4}")
        options = {key: value for key, value in self._options.items() if value is not None}
        if self._kind not in SCALINGS:
            kinds = ", ".join(SCALINGS)
            raise BadInput(
                "scaling", self._kind, f"rope_type {kinds}; frequencies that change with a text can't be cached"
            )
        required, optional = SCALINGS[self._kind]
        if not required <= options.keys() <= required | optional:
            names = ", ".join(sorted(required)) or "nothing else"
            others = f"; optional: {', '.join(sorted(optional))}" if optional else ""
            raise BadInput("scaling", sorted(options), f"for {self._kind}: {names}{others}")
        numbers = {key: value for key, value in options.items() if key != "truncate"}
        wrong = [key for key, value in numbers.items() if not isinstance(value, int | float) or not value > 0]
        if wrong:
            raise BadInput(f"scaling.{wrong[0]}", options[wrong[0]], "a number above 0")
        if self._kind in RANGES:
            low, high = RANGES[self._kind]
            betas = BETAS | options
            if not betas[high] > betas[low]:
                raise BadInput(f"scaling.{high}", betas[high], f"more than {low}, {betas[low]}")

    @property
    def _kind(self) -> str:
        scaling = self.scaling or {}
        return str(scaling.get("rope_type", scaling.get("type", "default")))

    @property
    def _options(self) -> dict[str, Any]:
        options = {key: value for key, value in (self.scaling or {}).items() if key not in {"rope_type", "type"}}
        if "rope_theta" in options and options.pop("rope_theta") != self.base:
            raise BadInput("scaling.rope_theta", (self.scaling or {})["rope_theta"], f"base, {self.base}")
        return options

    @property
    def magnitude(self) -> float:
        """The factor of what is rotated: 1, but for yarn."""
        options = self._options
        if self._kind != "yarn":
            return 1.0
        if options.get("attention_factor") is not None:
            return float(options["attention_factor"])
        if options.get("mscale") and options.get("mscale_all_dim"):
            one, other = (yarn_magnitude(options["factor"], options[key]) for key in ("mscale", "mscale_all_dim"))
            return one / other
        return yarn_magnitude(options["factor"])

    def frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """Return (width / 2,) radians a token, float64 (float32 on MPS, which has no other)."""
        kind, options = self._kind, self._options
        m = torch.arange(width // 2, device=device, dtype=_precise(device))
        theta: Tensor = torch.exp(m * (-2 * math.log(self.base) / width))
        if kind == "default":
            return theta
        slow: Tensor = theta / options["factor"]
        if kind == "linear":
            return slow
        if kind == "yarn":
            low, high = self._yarn_range(width)
            ramp = ((m - low) / (high - low)).clamp(0, 1)
            return theta * (1 - ramp) + slow * ramp
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        turns = options[LENGTH] / (2 * math.pi / theta)  # of a pair within a text of pretraining
        part: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
        return slow * (1 - part) + theta * part

    def _yarn_range(self, width: int) -> tuple[float, float]:
        """Return the pairs at which interpolation starts and is complete."""
        options = self._options

        def pair(turns: float) -> float:
            return width * math.log(options[LENGTH] / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = (pair(options.get(name) or BETAS[name]) for name in ("beta_fast", "beta_slow"))
        if options.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        return low, high + 0.001 if low == high else high

    def width(self, head_dim: int) -> int:
        """Return how much of a head's width turns."""
        return int(head_dim * self.fraction)

    def rotate(self, places: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Rotate tensors (..., T, heads, d) of tokens at places (T,) or (B, T)."""
        width = self.width(tensors[0].shape[-1])
        angles = places[..., None, None].to(_precise(places.device)) * self.frequencies(width, places.device)
        magnitude = self.magnitude
        cos, sin = ((f(angles) * magnitude).to(tensors[0].dtype) for f in (torch.cos, torch.sin))
        return [_rotate(x, cos, sin) for x in tensors]


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press et al. 2022, arXiv:2108.12409): score - m_h |i - j|, a slope for each head.

    For p heads, p a power of two, the slopes are 2^(-8h/p), h = 1 to p; for more, those of p and of each second of 2p.
    """

    def slopes(self, heads: int) -> list[float]:
        """Return the slopes of all heads."""
        power = 2 ** math.floor(math.log2(heads))
        rest = heads - power
        return [2 ** (-8 * h / power) for h in range(1, power + 1)] + [
            2 ** (-4 * h / power) for h in range(1, 2 * rest, 2)
        ]


Position = Rotary | Alibi


def alibi_bias(queries: Tensor, keys: Tensor, slopes: Tensor) -> Tensor:
    """Return (1 or B, H, t, n), to be added to scores, of queries at places (t,) and keys at (n,) or (B, n).

    Slopes (H,) are those of `Alibi`, in the type of the scores.
    """
    distance = (queries[:, None] - keys[..., None, :]).abs().to(slopes.dtype)  # (t, n) or (B, t, n)
    distance = distance[None] if distance.dim() == 2 else distance
    return -slopes[:, None, None] * distance[:, None]


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 · mscale · ln(factor) + 1, by which YaRN multiplies what it rotates; 1 for a factor up to 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _precise(device: torch.device | None) -> torch.dtype:
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
