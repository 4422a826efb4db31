"""How the ranks of a run are started: forked from this process where that is safe, else as sub-processes."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    from strategies.base import DataParallel

BUILDING = ("configure_model", "setup")  # hooks that may make layers, and run in the ranks


class ForkLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, made safe for OpenMP, double precision, and parents that die or fit again."""

    _strategy: "DataParallel"

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function` in every rank and bring rank zero's results back."""
        if trainer is not None and trainer.lightning_module is not None:
            self._strategy.check_trainer(trainer)
            if not any(is_overridden(hook, trainer.lightning_module, LightningModule) for hook in BUILDING):
                self._strategy.check_module(trainer.lightning_module)
            # The ranks' weights come back into this module: one of another dtype would round them.
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        port = os.environ.get("MASTER_PORT")
        self._strategy.listen()
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:  # the next fit has a port of its own
            self._strategy.stop_listening()
            os.environ.pop("MASTER_PORT", None)
            if port is not None:
                os.environ["MASTER_PORT"] = port

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        _die_with_parent()
        if process_idx:
            self._strategy.stop_listening()  # where rank 0 dies nobody answers any more
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # keeps Lightning from choosing a number
        # A child hangs in OpenMP with more threads than one once its parent has used them.
        torch.set_num_threads(1)
        _compile_alone()
        if args[0] is not None:
            # Told to go, as when another rank has died, it goes: Lightning's own handler would talk to the others.
            args[0]._signal_connector._sigterm_notifier_fn = lambda *_: os._exit(128 + signal.SIGTERM)
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except Exception as exception:
            self._strategy.on_exception(exception)  # here, as Lightning calls it in the parent alone
            raise


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of sub-processes, which are told a port that no other run can take."""

    def __init__(self, strategy: "DataParallel") -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function` in this rank, after starting the others where nobody else does."""
        if not self.cluster_environment.creates_processes_externally:
            self._strategy.listen()
        return super().launch(function, *args, trainer=trainer, **kwargs)


def _compile_alone() -> None:
    """Have torch.compile compile in this process: the pool of compilers that its parent may have hangs in a fork."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if inductor := sys.modules.get("torch._inductor.config"):  # it has read the variable
        inductor.compile_threads = 1  # type: ignore[attr-defined]


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no rank trains on alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
