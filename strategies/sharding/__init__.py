"""What FSDP and HSDP do to a module: shard it, make it whole again, recompute activations."""
