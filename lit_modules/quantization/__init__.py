"""Int8 nets over torchao's PT2E (the extra [quant], which is imported when it is used)."""
