"""Int8 nets with torchao's PT2E (the extra [quant], imported on use)."""

from lit_modules.quantization.fake_quantized import FakeQuantized, quantize_post_training
from lit_modules.quantization.graphs import EXTRA
