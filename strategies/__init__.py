"""Where tensors live: Lightning Strategy objects, usable in anyone's Lightning project."""

from strategies.ddp import DDP

__all__ = ["DDP"]
