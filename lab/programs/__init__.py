"""Programs of a page each: what PyTorch's tutorials on distributed training build, with equal numbers everywhere."""
