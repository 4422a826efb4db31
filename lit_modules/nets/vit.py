"""A vision transformer for small images (Dosovitskiy et al. 2021), optionally with DeiT's distillation token."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention import Backend, Cache, FeatureMap
from lit_modules.nets.base import Shape, check_sizes, image_shape
from lit_modules.nets.mixers import Blocks, Mixers, TokenPosition
from lit_modules.nets.mlps import MixtureOfExperts, TokenMLP
from lit_modules.nets.norms import TokenNorm
from lit_modules.nets.tokens import TokenGrid
from lit_modules.nets.transformer import Block, NormPlace, Transformer
from lit_modules.nets.vit_names import Library, check_same, from_library, read_settings, rename

ImageMixer = Literal["softmax", "linear"]
STD = 0.02  # of initial weights, as in DeiT
EPS = 1e-6  # of norms, as in timm and torchvision; GPT-2's is 1e-5


class ViT(Transformer):
    """A class token and an image's patches as tokens; learned positions, pre-norm blocks (arXiv:2010.11929).

    With a distillation token (DeiT, Touvron et al. 2021, arXiv:2012.12877) a second head, `head_dist`, reads that
    token, and the logits are the mean of both heads, in training too. An objective that trains each head separately,
    such as `DeiTToken`, reads the layers `head` and `head_dist`.

    The feature layer is the patches' input of the last block, as maps (B, D, H / patch_size, W / patch_size).

    Args:
        patch_size: pixels of a patch's side, a divisor of height and width.
        embed_dim: D, width of tokens.
        num_layers: number of blocks, at least 1.
        num_heads: attention heads, a divisor of `embed_dim`.
        mlp_ratio: the MLPs' hidden width divided by D.
        dropout: probability of a zero in the embedding and the residual branches; keyed.
        distillation_token: whether to add a distillation token and its head.
        backend: the attention kernel, see `SelfAttention`.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`; null for as many.
        head_dim: width of a head; null for `embed_dim` / `num_heads`.
        position: learned positions are added to tokens; rotary ones, along the patches row by row, turn queries and
            keys; alibi lowers scores by distance; null for none.
        rope_base: of rotary positions' frequencies.
        qk_norm: whether queries and keys of each head are normed (ViT-22B, arXiv:2302.05442).
        softcap: c of scores c · tanh(score / c); null for none.
        gate: whether heads' outputs are multiplied by sigmoids of the token.
        norm: layer norm or rms.
        norm_place: pre, post (after each sum) or sandwich (before and after each part).
        norm_eps: epsilon of the norms.
        mlp: gelu, gelu_tanh, swiglu, geglu or moe, a mixture of SwiGLU experts (V-MoE, arXiv:2106.05974).
        hidden: width of the MLP, or of each expert; null: `mlp_ratio` D, if gated 8 D / 3.
        experts: of a mixture.
        top_k: experts that a token goes through.
        renormalise: whether the weights of a token's experts sum to 1.
        router_noise: in training routers' inputs are multiplied by 1 ± this; keyed.
        balance: weight of the loss that balances experts' loads, over the global batch.
        mixer: softmax attention, or linear, in time linear in the number of patches (arXiv:2006.16236).
        softmax_every: beside linear, every n-th block has softmax attention; null for none.
        feature_map: of linear: elu, hedgehog or taylor; null: elu.
    """

    pooled_layer = "head<"

    def __init__(
        self,
        patch_size: int = 4,
        embed_dim: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        distillation_token: bool = False,
        backend: Backend = "auto",
        input_shape: Shape = (3, 32, 32),
        num_classes: int = 10,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: TokenPosition | None = "learned",
        rope_base: float = 10000.0,
        qk_norm: bool = False,
        softcap: float | None = None,
        gate: bool = False,
        norm: TokenNorm = "layer",
        norm_place: NormPlace = "pre",
        norm_eps: float = EPS,
        mlp: TokenMLP = "gelu",
        hidden: int | None = None,
        experts: int = 8,
        top_k: int = 2,
        renormalise: bool = True,
        router_noise: float = 0.0,
        balance: float = 0.01,
        mixer: ImageMixer = "softmax",
        softmax_every: int | None = None,
        feature_map: FeatureMap | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape)
        if patch_size < 1 or height % patch_size or width % patch_size:
            raise BadInput("patch_size", patch_size, f"a divisor of the images' {height} x {width} pixels")
        check_sizes(embed_dim=embed_dim, num_layers=num_layers, mlp_ratio=mlp_ratio)
        rows, columns, self.num_tokens = height // patch_size, width // patch_size, 1 + distillation_token
        self.token_grid = TokenGrid(rows, columns, self.num_tokens)
        self.embedding = _Embedding(
            channels, patch_size, self.num_tokens, rows * columns, embed_dim, dropout, position == "learned"
        )
        mixers = Mixers(
            embed_dim, num_heads, False, backend=backend, num_kv_heads=num_kv_heads, head_dim=head_dim,
            position=position, rope_base=rope_base, qk_norm=qk_norm, softcap=softcap, gate=gate, mixer=mixer,
            softmax_every=softmax_every, feature_map=feature_map,
        )  # fmt: skip
        options = Blocks(
            mixers, dropout, norm, norm_place, norm_eps, False, mlp, mlp_ratio, hidden, experts, top_k, renormalise,
            router_noise, balance,
        )  # fmt: skip
        self.blocks = nn.ModuleList(_Block(rows, columns, **options.options(number)) for number in range(num_layers))
        self.feature_layer = f"blocks.{num_layers - 1}.maps"
        self.stages = tuple(f"blocks.{number}.maps" for number in range(1, num_layers)) or (self.feature_layer,)
        self.norm = options.last_norm()
        self.head = nn.Linear(embed_dim, num_classes)
        if distillation_token:
            self.head_dist = nn.Linear(embed_dim, num_classes)
            self.head_layers = ("head", "head_dist")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, MixtureOfExperts):
                for weight in (module.gate, module.up, module.down):
                    nn.init.trunc_normal_(weight, std=STD)

    @classmethod
    def from_library(cls, model: nn.Module, **options: Any) -> "ViT":
        """Return a ViT with the settings and weights of a `VisionTransformer` of timm or torchvision.

        Raises:
            BadInput: it computes what ViT does not: it is tried on one image.
        """
        net = cls(**{**read_settings(model), **options}).to(next(model.parameters()).dtype)
        net.load_state_dict(from_library(net, model))
        check_same(net, model)
        return net.train(model.training)

    def library_weights(self, library: Library) -> dict[str, Tensor]:
        """Return the state dict of the same net of timm or torchvision; BadInput if they have no such net."""
        plain = {name: parameter.default for name, parameter in inspect.signature(ViT).parameters.items()}
        sizes = {"patch_size", "embed_dim", "num_layers", "num_heads", "mlp_ratio", "input_shape", "num_classes"}
        for name, value in self.init_args.items():
            if name not in {*sizes, "dropout", "backend", "norm_eps"} and value != plain[name]:
                raise BadInput(name, value, f"{plain[name]}, its default: {library} has no such net under these names")
        return {rename(key, library): value for key, value in self.state_dict().items()}

    @property
    def heads(self) -> list[nn.Module]:
        """The heads, one for each token before the patches."""
        return [self.head, self.head_dist] if self.num_tokens == 2 else [self.head]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        x = self.embedding(images)
        for block in self.blocks:
            x = block(x)
        return _logits(self.norm, self.heads, x)

    def pipeline_stages(self) -> list[nn.Module]:
        self.check_pipeline()
        return [self.embedding, *self.blocks, _Heads(self.norm, self.heads)]


class _Embedding(nn.Module):
    """Images (B, C, H, W) to tokens (B, extra + patches, D)."""

    def __init__(
        self, channels: int, size: int, extra: int, patches: int, embed_dim: int, dropout: float, learned: bool
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, embed_dim, size, size)
        self.tokens = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, extra, embed_dim), std=STD))
        places = torch.empty(1, extra + patches, embed_dim)
        self.positions = nn.Parameter(nn.init.trunc_normal_(places, std=STD)) if learned else None
        self.dropout = Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, D)
        tokens = self.tokens.expand(patches.shape[0], -1, -1)
        x = torch.cat([tokens, patches], 1)
        embedded: Tensor = self.dropout(x if self.positions is None else x + self.positions)
        return embedded


class _Maps(nn.Module):
    """The patches' tokens as maps, for objectives: (B, T, D) -> (B, D, rows, columns)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = x[:, -self.rows * self.columns :].transpose(1, 2).unflatten(2, (self.rows, self.columns))
        return maps


class _Block(Block):
    """A block whose child `maps` shows its input as maps to hooks."""

    def __init__(self, rows: int, columns: int, **options: Any) -> None:
        super().__init__(**options)
        self.maps = _Maps(rows, columns)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        self.maps(x)
        return super().forward(x, cache, mask)


class _Heads(nn.Module):
    """Norm and heads as one pipeline stage."""

    def __init__(self, norm: nn.Module, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.norm, self.heads = norm, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        return _logits(self.norm, self.heads, x)


def _logits(norm: nn.Module, heads: Sequence[nn.Module] | nn.ModuleList, x: Tensor) -> Tensor:
    """Return (B, classes), the mean of the heads' logits, from the first tokens of x (B, T, D)."""
    x = norm(x[:, : len(heads)])
    return torch.stack([head(x[:, number]) for number, head in enumerate(heads)]).mean(0)
