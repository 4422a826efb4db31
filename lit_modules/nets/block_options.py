"""What the blocks of a transformer are made of: one set of options for `GPT`, `ViT` and what builds their blocks."""

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.form import Backend, QKNorm
from lit_modules.nets.attention.linear import FeatureMap
from lit_modules.nets.mlps import TokenMLP
from lit_modules.nets.norms import TokenNorm
from lit_modules.nets.transformer import NormPlace

MixerName = Literal["softmax", "latent", "differential", "linear", "gated", "delta", "windowed"]
MakeMixer = type[nn.Module] | Callable[..., nn.Module]  # by embed_dim, num_heads or layer
TokenPosition = Literal["learned", "rotary", "alibi"]
Init = TypeVar("Init", bound=Callable[..., None])

RECURRENT = ("linear", "gated", "delta")  # mixers with a state, which have an order of tokens by themselves
UNORDERED = ("softmax", "linear")  # mixers of images
MAPPED = ("linear", "windowed")  # mixers that have a feature map
ROTARY = ("rope_base", "rope_scaling", "rope_fraction", "local_rope_base")  # options of rotary positions
EXPERTS = ("experts", "top_k", "renormalise", "router_noise", "balance")
SOFTMAX = (
    "num_kv_heads", "head_dim", "window", "sinks", "qk_norm", "softcap", "gate", "scale",
    "attention_dropout", "backend", "full_every", "qkv_bias", "rope_fraction", "nope_every",
    "local_rope_base",
)  # fmt: skip
TAKEN = {  # of these by other mixers
    "latent": ("head_dim", "attention_dropout", "backend", "scale"),
    "differential": ("num_kv_heads", "head_dim", "backend", "scale"),
    "windowed": ("num_kv_heads", "head_dim", "window", "scale", "qkv_bias", "rope_fraction"),
}


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """What the blocks of a net are made of. Constructors of nets take most of these as arguments of their own.

    Args:
        embed_dim: D, width of tokens.
        num_heads: attention heads of a block, a divisor of `embed_dim`.
        causal: whether a token sees only itself and earlier ones.
        dropout: probability of a zero in residual branches; keyed.
        bias: whether projections and norms have a bias.
        mlp_ratio: hidden width of an MLP without a gate, divided by D.
        attention_dropout: probability of a zero attention weight; keyed, but for a kernel that is chosen by its name.
        backend: the attention kernel, see `SelfAttention`.
        mixer: what mixes tokens: softmax attention, latent (DeepSeek's, a compressed cache), differential, or linear,
            gated (GLA) or delta (Gated DeltaNet), whose state does not grow with the text, or windowed: softmax in a
            window (64) and linear beyond it (LoLCATs). Or a class or function of your own that makes a `TokenMixer`.
        softmax_every: beside another mixer, every n-th block has softmax attention; null for none.
        softmax_layers: beside another mixer, the blocks that have softmax attention; the first is 0.
        conv: width of the short convolution of linear, gated and delta, 0 for none; null: 4 of delta, 0 of the others.
        feature_map: elu, hedgehog or taylor; null: elu of linear, hedgehog of windowed.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`; 1 is multi-query; null for as many.
        head_dim: width of a head; null for `embed_dim` / `num_heads`.
        position: learned positions are added to tokens; rotary ones turn queries and keys; alibi lowers scores by
            distance; null for none.
        rope_base: of rotary positions' frequencies.
        rope_scaling: of rotary positions beyond the texts of pretraining, as transformers' `rope_parameters`.
        rope_fraction: of a head's width that rotary positions turn (Phi-4-mini: 0.75).
        nope_every: every n-th block has no positions; null for none (SmolLM3: 4).
        local_rope_base: rotary positions' base, without `rope_scaling`, in blocks with a window; null for that of all
            blocks (Gemma 3: 10000).
        window: a token attends to itself and the `window` - 1 before it; null for all.
        full_every: with a window, every n-th block attends to all tokens; null for none (Gemma 2: 2).
        sinks: with a window, a text's first tokens to which all attend.
        qkv_bias: whether queries, keys and values have a bias (Qwen2); null for `bias`.
        qk_norm: whether queries and keys of each head are normed (Qwen3, ViT-22B); width: those of all heads at once
            (OLMo 2).
        softcap: c of scores c · tanh(score / c) (Gemma 2: 50); null for none.
        gate: whether heads' outputs are multiplied by sigmoids of the token.
        scale: of scores; null for 1 / √head_dim.
        norm: layer norm or rms.
        norm_place: pre, post (after each sum), sandwich (before and after each part, Gemma 2) or after (after each
            part, before the sum, OLMo 2).
        layer_scale: first value of a factor for each channel of what a part adds (CaiT, DINOv2); null for none.
        norm_eps: epsilon of the norms.
        unit_offset: RMS norms, those of `qk_norm` too, multiply by 1 + weight (Gemma).
        mlp: gelu, gelu_tanh (GPT-2's), swiglu (Llama), geglu (Gemma) or moe, a mixture of SwiGLU experts.
        hidden: width of the MLP, or of each expert; null: 4 D (ViT: `mlp_ratio` D), if gated 8 D / 3.
        experts: of a mixture.
        top_k: experts that a token goes through.
        renormalise: whether the weights of a token's experts sum to 1 (Mixtral).
        router_noise: in training routers' inputs are multiplied by 1 ± this; keyed.
        balance: weight of the loss that balances experts' loads, over the global batch (Switch: 0.01).

    Raises:
        BadInput: a value can't be used, or two can't be combined.
    """

    embed_dim: int
    num_heads: int
    causal: bool
    dropout: float = 0.0
    bias: bool = True
    mlp_ratio: int = 4
    attention_dropout: float = 0.0
    backend: Backend = "auto"
    mixer: MixerName | MakeMixer = "softmax"
    softmax_every: int | None = None
    softmax_layers: list[int] | None = None
    conv: int | None = None
    feature_map: FeatureMap | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    position: TokenPosition | None = "learned"
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_fraction: float = 1.0
    nope_every: int | None = None
    local_rope_base: float | None = None
    window: int | None = None
    full_every: int | None = None
    sinks: int = 0
    qkv_bias: bool | None = None
    qk_norm: QKNorm = False
    softcap: float | None = None
    gate: bool = False
    scale: float | None = None
    norm: TokenNorm = "layer"
    norm_place: NormPlace = "pre"
    layer_scale: float | None = None
    norm_eps: float = 1e-5
    unit_offset: bool = False
    mlp: TokenMLP = "gelu"
    hidden: int | None = None
    experts: int = 8
    top_k: int = 2
    renormalise: bool = True
    router_noise: float = 0.0
    balance: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.attention_dropout < 1:
            raise BadInput("attention_dropout", self.attention_dropout, "at least 0, less than 1")
        self._check_mixer()
        self._check_position()
        if self.mlp != "moe":  # no balance is right without experts, too
            self._refuse_changed(EXPERTS if self.balance else EXPERTS[:-1], "its default, but for mlp=moe")
        if not 0 <= self.router_noise < 1:
            raise BadInput("router_noise", self.router_noise, "at least 0, less than 1")

    @property
    def mixer_name(self) -> str:
        """The name of the mixer, or of the class or function that makes it."""
        return name_of(self.mixer)

    @property
    def is_hybrid(self) -> bool:
        """Whether some blocks have softmax attention beside another mixer."""
        return self.softmax_every is not None or bool(self.softmax_layers)

    def has_softmax(self, number: int) -> bool:
        """Return whether the block `number`, from 0, has softmax attention."""
        of_hybrid = self.softmax_every is not None and (number + 1) % self.softmax_every == 0
        return self.mixer == "softmax" or of_hybrid or number in (self.softmax_layers or ())

    def _check_mixer(self) -> None:
        if self.position not in {*get_args(TokenPosition), None}:
            raise BadInput("position", self.position, "learned, rotary, alibi or null")
        if self.mixer not in get_args(MixerName) and not callable(self.mixer):
            expected = f"one of {', '.join(get_args(MixerName))}, or a class or function of your own"
            raise BadInput("mixer", self.mixer, expected)
        if not self.causal and self.mixer not in UNORDERED:
            raise BadInput("mixer", self.mixer_name, f"{' or '.join(UNORDERED)}: others see earlier tokens alone")
        if self.softmax_every is not None and (self.mixer == "softmax" or self.softmax_every < 1):
            expected = "at least 1, beside a mixer such as linear; with softmax all layers are"
            raise BadInput("softmax_every", self.softmax_every, expected)
        if self.softmax_layers is not None:
            self._check_softmax_layers(self.softmax_layers)
        if self.conv is not None and self.mixer not in RECURRENT:
            raise BadInput("conv", self.conv, f"null, or mixer={' or '.join(RECURRENT)}")
        if self.feature_map is not None and self.mixer not in MAPPED:
            raise BadInput("feature_map", self.feature_map, f"null, or mixer={' or '.join(MAPPED)}")
        if self.full_every is not None and (self.window is None or self.full_every < 1):
            raise BadInput("full_every", self.full_every, "at least 1, beside a window")
        if self.mixer != "softmax" and not self.is_hybrid:
            names = tuple(name for name in SOFTMAX if name not in TAKEN.get(self.mixer_name, ()))
            self._refuse_changed(names, f"its default with mixer={self.mixer_name}: it is of softmax attention")
        if self.mixer == "windowed":
            expected = "its default with mixer=windowed: blocks of softmax see all"
            self._refuse_changed(("full_every", "sinks", "local_rope_base"), expected)

    def _check_softmax_layers(self, layers: Sequence[int]) -> None:
        if self.mixer == "softmax" or self.softmax_every is not None:
            raise BadInput("softmax_layers", [*layers], "null, but for a mixer such as linear without softmax_every")
        if not layers or sorted({*layers}) != [*layers] or layers[0] < 0:
            raise BadInput("softmax_layers", [*layers], "numbers of blocks in their order, each once, the first is 0")

    def _check_position(self) -> None:
        if self.local_rope_base is not None and (self.window is None or not 1 < self.local_rope_base < math.inf):
            raise BadInput("local_rope_base", self.local_rope_base, "more than 1, beside a window")
        if self.position != "rotary":
            self._refuse_changed(ROTARY, "its default, but for position=rotary")
        if self.nope_every is not None and (self.position not in {"rotary", "alibi"} or self.nope_every < 1):
            raise BadInput("nope_every", self.nope_every, "at least 1, beside position=rotary or alibi")
        if self.mixer in RECURRENT and not self.is_hybrid and self.position in {"rotary", "alibi"}:
            why = "which has an order of tokens by itself" if self.causal else "which has no scores of pairs"
            raise BadInput("position", self.position, f"learned or null with mixer={self.mixer}, {why}")
        if callable(self.mixer) and not self.is_hybrid and self.position in {"rotary", "alibi"}:
            expected = f"learned or null with mixer={self.mixer_name}, which is not given others"
            raise BadInput("position", self.position, expected)
        if self.mixer in TAKEN and self.position == "alibi":
            raise BadInput("position", self.position, f"learned, rotary or null with mixer={self.mixer}")

    def _refuse_changed(self, names: Sequence[str], expected: str) -> None:
        """Raise BadInput for the first of these options that differs from its default."""
        for name in names:
            if getattr(self, name) != getattr(type(self), name):
                raise BadInput(name, getattr(self, name), expected)


def name_of(mixer: object) -> str:
    """Return the name of a mixer, or of the class or function that makes it."""
    made_by = getattr(mixer, "func", mixer)  # of a functools.partial
    return mixer if isinstance(mixer, str) else getattr(made_by, "__name__", type(mixer).__name__)


def takes_block_options(without: Collection[str] = ()) -> Callable[[Init], Init]:
    """Let a constructor's `**options` stand for the block options that it does not name itself, but for some `without`.

    Signature and help, which the command line reads, have each of them.
    """

    def decorate(init: Init) -> Init:
        signature = inspect.signature(init)
        named = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
        left_out = {*without, *(x.name for x in named), "causal"}
        options = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in fields(BlockOptions)
            if field.name not in left_out
        ]
        vars(init)["__signature__"] = signature.replace(parameters=[*named, *options])
        init.__doc__ = BlockOptions.__doc__
        return init

    return decorate
