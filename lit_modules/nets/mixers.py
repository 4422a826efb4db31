"""What stands in the blocks of a net, by the names of its options: softmax attention or another mixer, and the MLP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets.attention import (
    Alibi,
    Backend,
    DeltaAttention,
    DifferentialAttention,
    FeatureMap,
    GatedLinearAttention,
    LatentAttention,
    LinearAttention,
    Rotary,
    SelfAttention,
    WindowedLinearAttention,
)
from lit_modules.nets.base import check_sizes
from lit_modules.nets.mlps import MixtureOfExperts, TokenMLP, token_mlp
from lit_modules.nets.norms import RMSNorm, TokenNorm, token_norm
from lit_modules.nets.transformer import Block, NormPlace

MixerName = Literal["softmax", "latent", "differential", "linear", "gated", "delta", "windowed"]
TokenPosition = Literal["learned", "rotary", "alibi"]
LINEAR: dict[str, Callable[..., nn.Module]] = {
    "linear": LinearAttention,
    "gated": GatedLinearAttention,
    "delta": DeltaAttention,
}

SOFTMAX = (
    "num_kv_heads", "head_dim", "window", "sinks", "qk_norm", "softcap", "gate", "scale",
    "attention_dropout", "backend", "full_every",
)  # fmt: skip
TAKEN = {  # of these by other mixers
    "latent": ("head_dim", "attention_dropout", "backend", "scale"),
    "differential": ("num_kv_heads", "head_dim", "backend", "scale"),
    "windowed": ("num_kv_heads", "head_dim", "window", "scale"),
}
NOISE = 1 << 16  # number of the first block's dropout of attention weights, beyond those of all other dropout layers
WINDOW = 64  # of the mixer windowed, if none is given
MAPPED = ("linear", "windowed")  # that have a feature map
UNORDERED = ("softmax", "linear")  # of images


@dataclass(frozen=True)
class Mixers:
    """The mixers of a net's blocks: see the options of `GPT`, which have these names."""

    embed_dim: int
    num_heads: int
    causal: bool
    attention_dropout: float = 0.0
    bias: bool = True
    backend: Backend = "auto"
    mixer: MixerName = "softmax"
    softmax_every: int | None = None
    softmax_layers: Sequence[int] | None = None
    conv: int | None = None
    feature_map: FeatureMap | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    position: TokenPosition | None = "learned"
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    window: int | None = None
    full_every: int | None = None
    sinks: int = 0
    qk_norm: bool = False
    softcap: float | None = None
    gate: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.position not in {"learned", "rotary", "alibi", None}:
            raise BadInput("position", self.position, "learned, rotary, alibi or null")
        if self.mixer not in get_args(MixerName):
            raise BadInput("mixer", self.mixer, f"one of {', '.join(get_args(MixerName))}")
        if not self.causal and self.mixer not in UNORDERED:
            raise BadInput("mixer", self.mixer, f"{' or '.join(UNORDERED)}: others see earlier tokens alone")
        if self.softmax_every is not None and (self.mixer == "softmax" or self.softmax_every < 1):
            expected = "at least 1, beside a mixer such as linear; with softmax all layers are"
            raise BadInput("softmax_every", self.softmax_every, expected)
        if self.softmax_layers is not None:
            self._check_softmax_layers(self.softmax_layers)
        if self.conv is not None and self.mixer not in LINEAR:
            raise BadInput("conv", self.conv, f"null, or mixer={' or '.join(LINEAR)}")
        if self.feature_map is not None and self.mixer not in MAPPED:
            raise BadInput("feature_map", self.feature_map, f"null, or mixer={' or '.join(MAPPED)}")
        if self.full_every is not None and (self.window is None or self.full_every < 1):
            raise BadInput("full_every", self.full_every, "at least 1, beside a window")
        if self.position != "rotary":
            self._refuse_changed(("rope_base", "rope_scaling"), "its default, but for position=rotary")
        if self.mixer != "softmax" and not self.is_hybrid:
            names = tuple(name for name in SOFTMAX if name not in TAKEN.get(self.mixer, ()))
            self._refuse_changed(names, f"its default with mixer={self.mixer}: it is of softmax attention")
        if self.mixer == "windowed":
            self._refuse_changed(("full_every", "sinks"), "its default with mixer=windowed: blocks of softmax see all")
        self._check_position()

    @property
    def is_hybrid(self) -> bool:
        """Whether some blocks have softmax attention beside another mixer."""
        return self.softmax_every is not None or bool(self.softmax_layers)

    def _check_softmax_layers(self, layers: Sequence[int]) -> None:
        if self.mixer == "softmax" or self.softmax_every is not None:
            raise BadInput("softmax_layers", [*layers], "null, but for a mixer such as linear without softmax_every")
        if not layers or sorted({*layers}) != [*layers] or layers[0] < 0:
            raise BadInput("softmax_layers", [*layers], "numbers of blocks in their order, each once, the first is 0")

    def _check_position(self) -> None:
        if self.mixer in LINEAR and not self.is_hybrid and self.position in {"rotary", "alibi"}:
            why = "which has an order of tokens by itself" if self.causal else "which has no scores of pairs"
            raise BadInput("position", self.position, f"learned or null with mixer={self.mixer}, {why}")
        if self.mixer in TAKEN and self.position == "alibi":
            raise BadInput("position", self.position, f"learned, rotary or null with mixer={self.mixer}")

    def _refuse_changed(self, names: tuple[str, ...], expected: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise BadInput(name, getattr(self, name), expected)

    def make(self, number: int) -> nn.Module:
        """Return the mixer of the block `number`, from 0."""
        of_hybrid = self.softmax_every is not None and (number + 1) % self.softmax_every == 0
        if self.mixer == "softmax" or of_hybrid or number in (self.softmax_layers or ()):
            return self._softmax(number)
        chosen = {name: getattr(self, name) for name in ("conv", "feature_map") if getattr(self, name) is not None}
        if self.mixer == "linear":
            chosen |= {"causal": self.causal}
        if self.mixer in LINEAR:
            return LINEAR[self.mixer](self.embed_dim, self.num_heads, bias=self.bias, **chosen)
        taken = {name: getattr(self, name) for name in TAKEN[self.mixer]}
        if self.mixer == "windowed":
            taken |= chosen | {"window": WINDOW if self.window is None else self.window}
            return WindowedLinearAttention(
                self.embed_dim, self.num_heads, bias=self.bias, position=self._rotary(), **taken
            )
        if self.mixer == "differential":
            taken |= {"layer": number}
        else:
            taken |= {"dropout": taken.pop("attention_dropout"), "layer": NOISE + number}
        kind: Callable[..., nn.Module] = DifferentialAttention if self.mixer == "differential" else LatentAttention
        sizes = self.embed_dim, self.num_heads, self.causal
        return kind(*sizes, bias=self.bias, position=self._rotary(), **taken)

    def _rotary(self) -> Rotary | None:
        if self.position != "rotary":
            return None
        try:
            return Rotary(self.rope_base, self.rope_scaling)
        except BadInput as fault:
            raise BadInput(f"rope_{fault.argument}", fault.value, fault.expected) from None

    def _softmax(self, number: int) -> SelfAttention:
        is_full = self.mixer == "windowed" or (self.full_every is not None and (number + 1) % self.full_every == 0)
        return SelfAttention(
            self.embed_dim, self.num_heads, self.causal, self.attention_dropout, self.bias, self.backend,
            num_kv_heads=self.num_kv_heads, position=Alibi() if self.position == "alibi" else self._rotary(),
            window=None if is_full else self.window, sinks=0 if is_full else self.sinks, qk_norm=self.qk_norm,
            softcap=self.softcap, gate=self.gate, head_dim=self.head_dim, scale=self.scale, layer=NOISE + number,
        )  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """The blocks of a net around their mixers: see the options of `GPT`, which have these names."""

    mixers: Mixers
    dropout: float = 0.0
    norm: TokenNorm = "layer"
    norm_place: NormPlace = "pre"
    norm_eps: float = 1e-5
    unit_offset: bool = False
    mlp: TokenMLP = "gelu"
    mlp_ratio: int = 4
    hidden: int | None = None
    experts: int = 8
    top_k: int = 2
    renormalise: bool = True
    router_noise: float = 0.0
    balance: float = 0.01

    def options(self, number: int) -> dict[str, Any]:
        """Return the arguments of `Block` for the block `number`, from 0; modules are made in a fixed order."""
        check_sizes(mlp_ratio=self.mlp_ratio)
        mixer, width, bias = self.mixers.make(number), self.mixers.embed_dim, self.mixers.bias
        for name in ("q_norm", "k_norm"):
            if self.norm == "rms" and isinstance(head_norm := getattr(mixer, name, None), RMSNorm):
                head_norm.eps = self.norm_eps
        if self.mlp == "moe":
            routing = self.experts, self.top_k, self.renormalise, self.router_noise, number
            mlp: nn.Module = MixtureOfExperts(width, self.hidden, *routing, self.balance)
        else:
            mlp = token_mlp(self.mlp, width, self.hidden, bias, self.mlp_ratio)
        return {
            "attention": mixer, "mlp_ratio": self.mlp_ratio, "dropout": self.dropout, "bias": bias,
            "layer": 1 + 2 * number, "norm_eps": self.norm_eps, "mlp": mlp, "make_norm": self.make_norm,
            "norm_place": self.norm_place,
        }  # fmt: skip

    def make(self, number: int) -> Block:
        """Return the block `number`, from 0."""
        return Block(**self.options(number))

    def make_norm(self) -> nn.Module:
        """Return a norm as the blocks have it."""
        mixers = self.mixers
        return token_norm(self.norm, mixers.embed_dim, self.norm_eps, mixers.bias, self.unit_offset)

    def last_norm(self) -> nn.Module:
        """Return the norm after the last block, which ends in one if its norms come after sums."""
        return nn.Identity() if self.norm_place == "post" else self.make_norm()
