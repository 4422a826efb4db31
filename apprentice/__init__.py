"""The numeric core: keyed randomness, the global batch, collectives over replicas, errors, weights files."""
