"""Where tensors live: Lightning Strategy objects, usable in anyone's Lightning project."""

from strategies.ddp import DDP

__all__ = ["DDP"]


def register() -> None:
    """Put these strategies under their names in Lightning's registry, where its own choice finds them too."""
    from lightning.pytorch.strategies import StrategyRegistry

    methods = {"ddp": "auto", "ddp_fork": "fork", "ddp_notebook": "fork", "ddp_spawn": "spawn"}
    for name, method in methods.items():
        StrategyRegistry.register(name, DDP, "forked data parallelism", override=True, start_method=method)
