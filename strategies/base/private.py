"""Private names of torch and Lightning, for strategies and the layers above; `apprentice/private.py` has the others."""

from types import ModuleType
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_init_fn
from lightning.fabric.utilities.distributed import _destroy_dist_connection as destroy_process_group
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.pytorch import Callback
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers as init_optimizers
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook as register_ddp_comm_hook
from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype as default_dtype
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as LogMetadata
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name as name_of_lr
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit
from lightning.pytorch.utilities.model_helpers import _ModuleMode as ModuleMode
from torch.distributed._composable_state import _module_state_mapping as module_state_mapping
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path

from apprentice.private import TORCH

LIGHTNING = ">=2.6.6,<2.7"  # the versions that have them, with TORCH


def callbacks_of(trainer: Any) -> list[Callback]:
    """Return a Trainer's callbacks, of which its type does not tell; a change of the list is one of the Trainer's."""
    callbacks: list[Callback] = trainer.callbacks
    return callbacks


def inductor_config() -> ModuleType:
    """Return Inductor's settings; slow to import."""
    import torch._inductor.config

    return torch._inductor.config


def has_cpp_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler; slow."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return False
