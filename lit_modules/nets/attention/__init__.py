"""Attention layers, one concept a file."""

from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.convolution import ShortConvolution
from lit_modules.nets.attention.delta import DeltaAttention
from lit_modules.nets.attention.gated import GatedLinearAttention
from lit_modules.nets.attention.kernels import Backend, use_kernel
from lit_modules.nets.attention.linear import LinearAttention
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.attention.positions import Alibi, Rotary
from lit_modules.nets.attention.softmax import SelfAttention, any_kernel

__all__ = [
    "Alibi",
    "Backend",
    "Cache",
    "DeltaAttention",
    "GatedLinearAttention",
    "LinearAttention",
    "Rotary",
    "SelfAttention",
    "ShortConvolution",
    "any_kernel",
    "mask_texts",
    "use_kernel",
]
