"""Int8 nets over torchao's PT2E (the extra [quant], which is imported when it is used)."""

from lit_modules.quantization.fake_quantized import FakeQuantized, post_training
from lit_modules.quantization.graphs import EXTRA

__all__ = ["EXTRA", "FakeQuantized", "post_training"]
