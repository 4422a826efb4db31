"""The numeric core: keyed randomness, the global batch, collectives over replicas, errors, contract, weights files."""

__version__ = "0.2.0"
