"""Data parallelism that starts quickly on CPU: Lightning's DDPStrategy over forked processes."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

StartMethod = Literal["auto", "fork", "spawn", "popen"]


class DDP(DDPStrategy):
    """Distributed data parallel whose ranks are forked from this process where that is safe.

    A forked rank starts in a second where a sub-process imports everything again (8 ranks: 10 s against 80 s).

    Args:
        start_method: "fork", "spawn", "popen" (sub-processes), or "auto": fork on CPU, sub-processes otherwise. Where a
            launcher has started the ranks already (torchrun, SLURM, MPI), none is started.
        timeout: seconds a rank may keep the others waiting.
        **kwargs: DDPStrategy's and DistributedDataParallel's own arguments.
    """

    def __init__(self, start_method: StartMethod = "auto", timeout: float = 1800, **kwargs: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout), **kwargs)
        self.start_method = start_method

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        method = self._resolved_start_method()
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            self._launcher = launcher
        else:
            self._start_method = method
            self._launcher = ForkLauncher(self, start_method=method)

    def _resolved_start_method(self) -> Any:
        if self.start_method != "auto":
            return self.start_method
        forks = "fork" in multiprocessing.get_all_start_methods()
        return "fork" if forks and self.root_device.type == "cpu" and not torch.cuda.is_initialized() else "popen"


class ForkLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, made safe for OpenMP, double precision, and parents that die or fit again."""

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function` in every rank and bring rank zero's results back."""
        if trainer is not None and trainer.lightning_module is not None:
            # The ranks' weights come back into this module: one of another dtype would round them.
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        port = os.environ.get("MASTER_PORT")
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:  # a later fit on the port of one that crashed can find it in use
            os.environ.pop("MASTER_PORT", None)
            if port is not None:
                os.environ["MASTER_PORT"] = port

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        _die_with_parent()
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # keeps Lightning from choosing a number
        # A child hangs in OpenMP with more threads than one once its parent has used them.
        torch.set_num_threads(1)
        super()._wrapping_function(process_idx, *args, **kwargs)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no rank trains on alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
