"""What FSDP and HSDP do to a module: wrap it, make it whole again, recompute activations."""
