"""A vision transformer for small images (Dosovitskiy et al. 2021), optionally with DeiT's distillation token."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.base import Shape, check_sizes, image_shape
from lit_modules.nets.block_options import BlockOptions, takes_block_options
from lit_modules.nets.blocks import block_arguments, make_last_norm
from lit_modules.nets.mlps import MixtureOfExperts
from lit_modules.nets.tokens import TokenGrid
from lit_modules.nets.transformer import Block, Transformer
from lit_modules.nets.vit_library import read_settings, read_weights

ImageMixer = Literal["softmax", "linear"]
OF_TEXTS = (
    "attention_dropout", "softmax_layers", "conv", "rope_scaling", "local_rope_base", "window", "full_every", "sinks",
    "scale", "unit_offset",
)  # fmt: skip
STD = 0.02  # of initial weights, as in DeiT
EPS = 1e-6  # of norms, as in timm and torchvision; GPT-2's is 1e-5


class ViT(Transformer):
    """A class token and an image's patches as tokens; learned positions, pre-norm blocks (arXiv:2010.11929).

    With a distillation token (DeiT, Touvron et al. 2021, arXiv:2012.12877) a second head, `head_dist`, reads that
    token, and the logits are the mean of both heads, in training too. An objective that trains each head separately,
    such as `DeiTToken`, reads the layers `head` and `head_dist`.

    Registers are further tokens that nothing reads after the last block (Darcet et al. 2024, arXiv:2309.16588).

    The feature layer is the patches' input of the last block, as maps (B, D, H / patch_size, W / patch_size).

    Args:
        patch_size: pixels of a patch's side, a divisor of height and width.
        embed_dim: D, width of tokens.
        num_layers: number of blocks, at least 1.
        num_heads: attention heads, a divisor of `embed_dim`.
        mlp_ratio: the MLPs' hidden width divided by D.
        dropout: probability of a zero in the embedding and the residual branches; keyed.
        distillation_token: whether to add a distillation token and its head.
        registers: number of register tokens, before the patches (DINOv2 with registers: 4).
        norm_eps: epsilon of the norms.
        mixer: softmax attention, or linear, in time linear in the number of patches (arXiv:2006.16236).
        options: those of `BlockOptions` that are not of texts. Rotary positions are those along the patches row by row;
            `hidden` null is `mlp_ratio` D without a gate; a mixture of experts is V-MoE's (arXiv:2106.05974).
    """

    pooled_layer = "head<"

    @takes_block_options(without=["bias", *OF_TEXTS])
    def __init__(
        self,
        patch_size: int = 4,
        embed_dim: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        distillation_token: bool = False,
        registers: int = 0,
        input_shape: Shape = (3, 32, 32),
        num_classes: int = 10,
        norm_eps: float = EPS,
        mixer: ImageMixer = "softmax",
        **options: Any,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape)
        if patch_size < 1 or height % patch_size or width % patch_size:
            raise BadInput("patch_size", patch_size, f"a divisor of the images' {height} x {width} pixels")
        check_sizes(embed_dim=embed_dim, num_layers=num_layers, mlp_ratio=mlp_ratio)
        if registers < 0:
            raise BadInput("registers", registers, "at least 0")
        rows, columns = height // patch_size, width // patch_size
        self.num_tokens = 1 + distillation_token + registers
        self.token_grid = TokenGrid(rows, columns, self.num_tokens)
        parts = BlockOptions(
            embed_dim=embed_dim, num_heads=num_heads, causal=False, dropout=dropout, mlp_ratio=mlp_ratio,
            norm_eps=norm_eps, mixer=mixer, **options,
        )  # fmt: skip
        is_learned = parts.position == "learned"
        self.embedding = _Embedding(
            (channels, height, width), patch_size, self.num_tokens, embed_dim, dropout, is_learned
        )
        self.blocks = nn.ModuleList(_Block(rows, columns, **block_arguments(parts, n)) for n in range(num_layers))
        self.feature_layer = f"blocks.{num_layers - 1}.maps"
        self.stages = tuple(f"blocks.{number}.maps" for number in range(1, num_layers)) or (self.feature_layer,)
        self.norm = make_last_norm(parts)
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
        """Return a ViT with the settings and weights of a vision transformer of timm or torchvision.

        Args:
            model: a `VisionTransformer`, or timm's `VisionTransformerDistilled` (DeiT); its type is kept.
            options: that change none of its weights, such as `backend`, or an `input_shape` of other height and width,
                for which the positions are resampled as timm does: bicubic, with antialiasing, in float32.

        Raises:
            BadInput: another model, or one that computes what ViT does not.
        """
        net = cls(**{**read_settings(model), **options}).to(next(model.parameters()))
        net.load_state_dict(read_weights(net, model))
        return net.train(model.training)

    @property
    def heads(self) -> list[nn.Module]:
        """The heads: of the class token, and of the distillation token if there is one."""
        return [self.head, self.head_dist] if self.head_layers else [self.head]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W); BadInput for images of another size."""
        x = self.embedding(images)
        for block in self.blocks:
            x = block(x)
        return _logits(self.norm, self.heads, x)

    def pipeline_stages(self) -> list[nn.Module]:
        self.check_pipeline()
        return [self.embedding, *self.blocks, _Heads(self.norm, self.heads)]


class _Embedding(nn.Module):
    """Images (B, C, H, W) to tokens (B, extra + patches, D)."""

    def __init__(self, shape: Shape, size: int, extra: int, embed_dim: int, dropout: float, learned: bool) -> None:
        super().__init__()
        self.shape, patches = shape, (shape[1] // size) * (shape[2] // size)
        self.patches = nn.Conv2d(shape[0], embed_dim, size, size)
        self.tokens = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, extra, embed_dim), std=STD))
        places = torch.empty(1, extra + patches, embed_dim)
        self.positions = nn.Parameter(nn.init.trunc_normal_(places, std=STD)) if learned else None
        self.dropout = Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.shape:
            raise BadInput(
                "images", tuple(images.shape), f"(B, {', '.join(map(str, self.shape))}), as input_shape says"
            )
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
