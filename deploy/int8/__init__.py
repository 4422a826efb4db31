"""Int8 nets with torchao's PT2E (the extra [quant], imported on use)."""

from deploy.int8.fake_quantization import FakeQuantized, quantize_post_training
from deploy.int8.graphs import EXTRA
