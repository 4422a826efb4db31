"""Lightning strategies: data parallel, sharded, exact, pipelined and over RPC, for any Lightning project."""

from typing import Any

from lightning.pytorch.strategies import FSDPStrategy, Strategy, StrategyRegistry

from strategies.allreduce import AllReduce
from strategies.base.data_parallel import DataParallel
from strategies.base.model_parallel import ModelParallel
from strategies.compressed import DDPFP16, DDPPowerSGD
from strategies.ddp import DDP
from strategies.ddp_ring import DDPRing
from strategies.fsdp import FSDP
from strategies.hsdp import HSDP
from strategies.local_sgd import LocalSGD
from strategies.param_server import ParamServer
from strategies.pipeline import PipelineStrategy
from strategies.rpc_hybrid import RPCHybrid
from strategies.zero1 import ZeRO1

# Short names, for `--trainer.strategy` and others: the class and the options that it gets.
NAMES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "ddp": (DDP, {}),
    "ddp_fork": (DDP, {"start_method": "fork"}),
    "ddp_notebook": (DDP, {"start_method": "fork"}),
    "ddp_spawn": (DDP, {"start_method": "spawn"}),
    "ddp_zero1": (ZeRO1, {}),
    "ddp_ring": (DDPRing, {}),
    "ddp_allreduce": (AllReduce, {}),
    "local_sgd": (LocalSGD, {}),
    "ddp_fp16": (DDPFP16, {}),
    "ddp_powersgd": (DDPPowerSGD, {}),
    "fsdp": (FSDP, {}),
    "hsdp": (HSDP, {}),
    "tensor_parallel": (FSDP, {"mesh": {"tensor": 2}}),
    "param_server": (ParamServer, {}),
    "rpc_hybrid": (RPCHybrid, {}),
    "pipeline": (PipelineStrategy, {}),
    "model_parallel": (PipelineStrategy, {"schedule": "GPipe", "num_microbatches": 1}),
}


def register() -> None:
    """Register these strategies by name in Lightning's registry, which its automatic choice uses too."""
    for name, (strategy, options) in NAMES.items():
        StrategyRegistry.register(name, strategy, (strategy.__doc__ or name).splitlines()[0], override=True, **options)
        if name in FSDPStrategy._registered_strategies:  # Lightning refuses these names on CPUs
            FSDPStrategy._registered_strategies.remove(name)
