"""Lightning strategies: data parallel, sharded, exact and pipelined, for any Lightning project.

Read `base.data_parallel` (how ranks start, meet and end), `exact.steps` (another way to run a batch), then a
strategy's module.
"""

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

if TYPE_CHECKING:
    from strategies.base.data_parallel import DataParallel
    from strategies.base.model_parallel import ModelParallel
    from strategies.ddp import DDP
    from strategies.fsdp import FSDP
    from strategies.hsdp import HSDP
    from strategies.pipeline import PipelineStrategy
    from strategies.zero1 import ZeRO1

BASES = ("strategies.base.data_parallel.DataParallel", "strategies.base.model_parallel.ModelParallel")
# Short names, for command lines and others: the class's import path and the options that it gets. A class is imported
# when it is chosen.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("strategies.ddp.DDP", {}),
    "ddp_fork": ("strategies.ddp.DDP", {"start_method": "fork"}),
    "ddp_notebook": ("strategies.ddp.DDP", {"start_method": "fork"}),
    "ddp_spawn": ("strategies.ddp.DDP", {"start_method": "spawn"}),
    "ddp_zero1": ("strategies.zero1.ZeRO1", {}),
    "ddp_ring": ("lab.strategies.ddp_ring.DDPRing", {}),
    "ddp_allreduce": ("lab.strategies.allreduce.AllReduce", {}),
    "local_sgd": ("lab.strategies.local_sgd.LocalSGD", {}),
    "ddp_fp16": ("lab.strategies.compressed.DDPFP16", {}),
    "ddp_powersgd": ("lab.strategies.compressed.DDPPowerSGD", {}),
    "fsdp": ("strategies.fsdp.FSDP", {}),
    "hsdp": ("strategies.hsdp.HSDP", {}),
    "tensor_parallel": ("strategies.fsdp.FSDP", {"mesh": {"tensor": 2}}),
    "param_server": ("lab.strategies.param_server.ParamServer", {}),
    "pipeline": ("strategies.pipeline.PipelineStrategy", {}),
    "model_parallel": ("strategies.pipeline.PipelineStrategy", {"schedule": "GPipe", "num_microbatches": 1}),
}


def register() -> None:
    """Register these strategies by name in Lightning's registry, which its automatic choice uses too."""
    variants = [name for name in StrategyRegistry.available_strategies() if "_find_unused_parameters_" in name]
    variants_of_ddp = {name: (NAMES["ddp"][0], StrategyRegistry[name]["init_params"]) for name in variants}
    for name, (path, options) in {**variants_of_ddp, **NAMES}.items():
        StrategyRegistry.register(name, partial(_build, path), name, override=True, **options)
        if name in FSDPStrategy._registered_strategies:  # Lightning refuses these names on CPUs
            FSDPStrategy._registered_strategies.remove(name)


def _build(path: str, **options: Any) -> Any:
    return resolve_name(path)(**options)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a class when it is used; `ring` and the classes of `lab` were here once."""
        classes = (*BASES, *(path for path, _ in NAMES.values()))
        paths = {"ring": "lab.strategies.ring", **{path.rpartition(".")[2]: path for path in classes}}
        if name not in paths:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return resolve_name(paths[name])
