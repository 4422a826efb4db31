"""Attention layers, one concept a file."""

from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.convolution import ShortConvolution
from lit_modules.nets.attention.cross import CrossAttention, Memory
from lit_modules.nets.attention.delta import DeltaAttention
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.gated import GatedLinearAttention
from lit_modules.nets.attention.kernels import Backend, use_kernel
from lit_modules.nets.attention.latent import LatentAttention
from lit_modules.nets.attention.linear import FeatureMap, LinearAttention
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.attention.positions import Alibi, Rotary
from lit_modules.nets.attention.rms_norm import RMSNorm
from lit_modules.nets.attention.softmax import SelfAttention, any_kernel
from lit_modules.nets.attention.windowed import WindowedLinearAttention

__all__ = [
    "Alibi",
    "Backend",
    "Cache",
    "CrossAttention",
    "DeltaAttention",
    "DifferentialAttention",
    "FeatureMap",
    "GatedLinearAttention",
    "LatentAttention",
    "LinearAttention",
    "Memory",
    "RMSNorm",
    "Rotary",
    "SelfAttention",
    "ShortConvolution",
    "WindowedLinearAttention",
    "any_kernel",
    "mask_texts",
    "use_kernel",
]
